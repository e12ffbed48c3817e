"""The examples for LLM backends: a GPU, shared memory, a long start, a volume of models, tokenizer folders."""

from pathlib import Path

import pytest

from tests.helm.pod_checks import amount
from tests.helm.rendering import (
    CHART,
    Document,
    environment_of,
    gateway_container,
    pod_spec,
    render,
    triton_container,
)

LLM_FILES = [CHART / "ci" / f"{name}-values.yaml" for name in ("vllm", "tensorrt-llm")]


@pytest.fixture(params=LLM_FILES, ids=lambda path: path.stem)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return render(request.param)


def mounts_of(container: Document) -> dict[str, Document]:
    return {each["mountPath"]: each for each in container["volumeMounts"]}


def volumes_of(documents: list[Document]) -> dict[str, Document]:
    return {each["name"]: each for each in pod_spec(documents)["volumes"]}


def test_triton_has_a_gpu(documents: list[Document]) -> None:
    assert triton_container(documents)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod_spec(documents)["runtimeClassName"] == "nvidia"


def test_dev_shm_has_gibibytes_of_memory(documents: list[Document]) -> None:
    volume = volumes_of(documents)[mounts_of(triton_container(documents))["/dev/shm"]["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert amount(volume["emptyDir"]["sizeLimit"]) >= 4 * 2**30


def test_the_start_may_take_half_an_hour(documents: list[Document]) -> None:
    probe = triton_container(documents)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


def test_both_containers_read_the_volume_of_models(documents: list[Document]) -> None:
    """Triton the repository, the gateway the folder of GATEWAY_TOKENIZERS."""
    tokenizers = environment_of(gateway_container(documents))["GATEWAY_TOKENIZERS"]
    repository = mounts_of(triton_container(documents))["/models"]
    folder = mounts_of(gateway_container(documents))[tokenizers]
    assert (folder["name"], folder["readOnly"], repository["readOnly"]) == (repository["name"], True, True)
    assert folder["subPath"] != repository["subPath"]
    assert "persistentVolumeClaim" in volumes_of(documents)[folder["name"]]


def test_inputs_are_added_by_auto_completion(documents: list[Document]) -> None:
    """A config.pbtxt of the vLLM backend usually names no tensors."""
    assert "--disable-auto-complete-config" not in triton_container(documents)["args"]


@pytest.mark.parametrize("path", LLM_FILES, ids=lambda path: path.stem)
def test_the_file_says_that_it_was_not_run(path: Path) -> None:
    assert "Not run on a GPU" in path.read_text().splitlines()[0]
