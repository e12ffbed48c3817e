"""Model repositories: as ``check`` reads them, and as the embedded Triton serves them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from app.core.model import RepositoryModel, Step, TensorSpec
from app.launcher.machine import RepositoryUnservable
from app.triton.codec import model_config_of
from app.triton.model_folder import parse_config
from app.triton.repository import read_repository, served_repository
from tests.toolkit.broken_repositories import Repository

PLAIN = """
name: "plain" backend: "python" max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] },
        { name: "NOTE" data_type: TYPE_STRING dims: 1 optional: true } ]
output [ { name: "Y" data_type: TYPE_BF16 dims: [ 2 ] } ]
model_transaction_policy { decoupled: true }
instance_group [ { count: 2 kind: KIND_CPU }, { kind: KIND_CPU }, { kind: KIND_GPU count: 2 gpus: [ 0, 1 ] } ]
parameters [ { key: "b" value { string_value: "2" } }, { key: "a" value { string_value: "1" } } ]
"""

ENSEMBLE = """
name: "whole" platform: "ensemble"
input [ { name: "X" data_type: TYPE_INT64 dims: [ 1 ] } ] output [ { name: "Y" data_type: TYPE_BOOL dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "first" model_version: -1 input_map { key: "A" value: "X" } output_map { key: "B" value: "between" } },
  { model_name: "second" model_version: 3 input_map { key: "C" value: "between" } output_map { key: "D" value: "Y" } }
] }
"""


def test_a_plain_model() -> None:
    config = model_config_of(parse_config(PLAIN))
    assert (config.name, config.backend, config.max_batch_size) == ("plain", "python", 8)
    assert config.inputs == (TensorSpec("X", "FP32", (-1, 4)), TensorSpec("NOTE", "BYTES", (1,), optional=True))
    assert config.outputs == (TensorSpec("Y", "BF16", (2,)),)
    assert (config.decoupled, config.is_ensemble, config.instance_count) == (True, False, 2 + 1 + 2 * 2)
    assert config.parameters == (("a", "1"), ("b", "2"))


def test_an_ensemble() -> None:
    config = model_config_of(parse_config(ENSEMBLE))
    assert (config.is_ensemble, config.backend, config.instance_count) == (True, "ensemble", 1)
    assert config.steps == (
        Step("first", "", (("A", "X"),), (("B", "between"),)),
        Step("second", "3", (("C", "between"),), (("D", "Y"),)),
    )


def test_an_older_configuration_names_a_platform() -> None:
    assert model_config_of(parse_config('name: "m" platform: "onnxruntime_onnx"')).backend == "onnxruntime_onnx"


@pytest.mark.parametrize("text", ['name: "m', "nam: 1", "max_batch_size: x", "input { data_type: TYPE_FP7 }"])
def test_the_error_for_an_invalid_configuration_has_the_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^\d+:\d+"):
        parse_config(text)


CALL = "pb_utils.InferenceRequest(model_name={}, inputs=[])"


class Ident:
    """A repository with the model ``ident``, whose files a test changes."""

    def __init__(self, path: Path) -> None:
        Repository(path).model("ident", "X", "Y")
        self.path = path
        self.folder = path / "ident"
        self.config = self.folder / "config.pbtxt"

    def declare(self, more: str) -> None:
        self.config.write_text(self.config.read_text() + more)

    def read(self) -> RepositoryModel:
        (model,) = read_repository(self.path)
        return model


@pytest.fixture
def ident(tmp_path: Path) -> Ident:
    return Ident(tmp_path)


def test_a_configuration_without_a_name_uses_its_folder(ident: Ident) -> None:
    ident.config.write_text(ident.config.read_text().replace('name: "ident"', ""))
    assert ident.read().config.name == "ident"


def test_a_model_without_a_configuration_has_no_complaint(ident: Ident) -> None:
    ident.config.unlink()
    model = ident.read()
    assert (model.config.inputs, model.complaint) == ((), "")


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ("", ("12",)),
        ("latest { num_versions: 2 }", ("12", "3")),
        ("specific { versions: [ 1, 3, 7 ] }", ("1", "3")),
        ("all { }", ("1", "12", "3")),
    ],
)
def test_versions_are_those_that_the_policy_loads(ident: Ident, policy: str, versions: tuple[str]) -> None:
    for name in ("12", "3", "04", "samples", "__pycache__"):
        (ident.folder / name).mkdir()
    ident.declare(f"version_policy {{ {policy} }}" if policy else "")
    assert ident.read().versions == versions


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("input { data_type: TYPE_FLOAT32 }", "no value named TYPE_FLOAT32; did you mean 'TYPE_FP32'?"),
        ("input { data_type: TYPE_BYTES }", "no value named TYPE_BYTES; did you mean 'TYPE_STRING'?"),
        ("input { data_type: TYPE_FP23 }", "no value named TYPE_FP23; did you mean 'TYPE_FP32'?"),
        ("inputs { }", "no field named \"inputs\"; did you mean 'input'?"),
        ("instance_group { kind: KIND_CPUS }", "did you mean 'KIND_CPU'?"),
        ("ensemble_scheduling { step { model: 1 } }", "did you mean 'model_name'?"),
    ],
)
def test_a_mistyped_name_gets_a_suggestion(ident: Ident, config: str, expected: str) -> None:
    ident.config.write_text(config)
    complaint = ident.read().complaint
    assert complaint.startswith(f"{ident.config}:1:")
    assert complaint.endswith(expected)


def test_the_error_for_an_unreadable_file_has_its_path(ident: Ident) -> None:
    ident.config.unlink()
    ident.config.symlink_to("absent")
    assert ident.read().complaint == f"{ident.config} cannot be read: No such file or directory"
    ident.config.unlink()
    ident.config.write_bytes(b"\xff")
    assert ident.read().complaint == f"{ident.config} cannot be read: it is not UTF-8 text"


@pytest.mark.parametrize(
    ("script", "calls"),
    [
        (CALL.format('"ocr"'), {"ocr"}),
        (CALL.format('"ocr"').replace("pb_utils.", ""), {"ocr"}),
        (CALL.format("name"), set()),
        ("def broken(:", set()),
        ("requests = [1]", set()),
    ],
)
def test_a_scripts_literal_calls_are_found(ident: Ident, script: str, calls: set[str]) -> None:
    (ident.folder / "1" / "model.py").write_text(script)
    assert ident.read().calls == calls


def test_declared_calls_are_found(ident: Ident) -> None:
    ident.declare('parameters { key: "bls_calls" value { string_value: "a , b," } }')
    assert ident.read().calls == {"a", "b"}


COMPLETE = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [-1] }
output { name: "Y" data_type: TYPE_FP32 dims: [-1] }
"""
AddModel = Callable[..., None]


@pytest.fixture
def add_model(tmp_path: Path) -> AddModel:
    def add_model(name: str, config: str | None = None, file: str = "model.py") -> None:
        version = tmp_path / name / "1"
        version.mkdir(parents=True)
        (version / file).touch()
        if config is not None:
            (version.parent / "config.pbtxt").write_text(config)

    return add_model


def test_models_are_the_sorted_folders(add_model: AddModel, tmp_path: Path) -> None:
    """Triton loads a folder with any name, and does not start if one is no model."""
    for name in ("b", "a", ".c"):
        add_model(name, COMPLETE)
    add_model("other-script", COMPLETE + 'default_model_filename: "other.py"', file="other.py")
    (tmp_path / "README.md").touch()
    assert served_repository(tmp_path).models == (".c", "a", "b", "other-script")


@pytest.mark.parametrize(
    ("config", "is_complete"),
    [
        (COMPLETE.replace('backend: "python"', 'platform: "ensemble"'), True),
        (None, False),
        ("", False),
        (COMPLETE.replace('backend: "python"', ""), False),
        (COMPLETE.replace("output", "input"), False),
        (COMPLETE.replace("data_type: TYPE_FP32", "", 1), False),
        (COMPLETE.replace("dims: [-1]", "", 1), False),
    ],
)
def test_complete_configurations_are_recognized(
    add_model: AddModel, tmp_path: Path, config: str | None, is_complete: bool
) -> None:
    add_model("a", COMPLETE)
    add_model("b", config)
    assert served_repository(tmp_path).is_complete is is_complete


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (("a", 'backend: "onnxruntime"', "model.onnx"), r"'a': it needs the backend 'onnxruntime'.*tritonserver image"),
        (("a", 'platform: "tensorrt_plan"', "model.plan"), r"'a': it needs the backend 'tensorrt'.*tritonserver image"),
        (("a", None, "model.pt"), r"'a': it needs the backend 'pytorch'.*tritonserver image"),
        (("a", COMPLETE + "\nnonsense: 1"), r"'a'.*config.pbtxt.*nonsense"),
        (("a", COMPLETE, "other.py"), r"Model 'a': .*/a/1/model\.py does not exist\."),
        # Triton 2.51 would wait for the model's process without end.
        (("bert base", COMPLETE), r"'bert base': the folder is 'bert base', and Triton 2.51 never"),
    ],
    ids=["onnxruntime", "a platform", "a file of PyTorch", "an invalid file", "no script", "a shell splits the name"],
)
def test_a_model_that_the_embedded_triton_cannot_serve_is_an_error(
    add_model: AddModel, tmp_path: Path, model: tuple[str, ...], message: str
) -> None:
    add_model(*model)
    with pytest.raises(RepositoryUnservable, match=message):
        served_repository(tmp_path)


def test_the_other_models_are_served_without_ensembles_of_a_refused_one(add_model: AddModel, tmp_path: Path) -> None:
    step = 'ensemble_scheduling {{step {{model_name: "{}" model_version: -1}}}}'
    add_model("a", COMPLETE)
    add_model("absent", COMPLETE, "other.py")
    add_model("inner", f'platform: "ensemble"\n{step.format("absent")}')
    add_model("outer", f'platform: "ensemble"\n{step.format("inner")}')
    for leftover in ("__pycache__", "old/1/__pycache__"):
        (tmp_path / leftover).mkdir(parents=True)
    found = served_repository(tmp_path)
    assert found.models == ("a",)
    assert found.refused == {
        "absent": f"{tmp_path}/absent/1/model.py does not exist.",
        "inner": "its step 'absent' is not served.",
        "outer": "its step 'inner' is not served.",
    }


def test_a_path_that_is_no_repository_is_an_error(add_model: AddModel, tmp_path: Path) -> None:
    add_model("a", COMPLETE)
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("absent", "no model repository"),
        ("empty", "contains no models"),
        ("a", f"a is the folder of one model: name the folder that has it, {tmp_path}"),
    ):
        for read in (read_repository, served_repository):
            with pytest.raises(RepositoryUnservable, match=message):
                read(tmp_path / name)
