"""LLM backends without a gateway.yaml: OpenAI's client over stand-ins with the tensors and habits of each backend."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from app.cli import main
from app.launcher.server import EmbeddedTriton
from tests.toolkit.llm_backends import (
    BACKENDS,
    TEMPLATE,
    TOKENIZER,
    running_backends,
    running_embeddings,
    running_llms,
    text_of_triton,
)
from tests.toolkit.processes import GatewayProcess, running_gateway
from tests.toolkit.waiting import PATIENCE_S

COUNTING = ("vllm", "tensorrt_llm")


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    with running_backends(tmp_path_factory.mktemp("backends"), models_venv) as triton:
        yield triton


@pytest.fixture(scope="module")
def llms(backends: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with running_llms(tmp_path_factory.mktemp("llms"), backends) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def embeddings(backends: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with (
        running_embeddings(tmp_path_factory.mktemp("embeddings"), backends) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture
def openai_client(llms: GatewayProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{llms.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("name", BACKENDS)
class TestEachBackend:
    def test_a_completion_is_the_text_of_the_backend(
        self, openai_client: OpenAI, llms: GatewayProcess, name: str
    ) -> None:
        whole = openai_client.completions.create(model=name, prompt="Once")
        chunks = list(openai_client.completions.create(model=name, prompt="Once", stream=True))
        assert whole.choices[0].text == text_of_triton(llms, name, "Once")
        assert "".join(each.choices[0].text for each in chunks) == whole.choices[0].text
        assert whole.choices[0].finish_reason in ("stop", "length")
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason

    def test_a_chat_uses_the_template_of_the_tokenizer_folder(
        self, openai_client: OpenAI, llms: GatewayProcess, name: str
    ) -> None:
        answer = openai_client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hi"}])
        assert answer.choices[0].message.content == text_of_triton(llms, name, "<user>Hi")
        assert answer.usage is not None or name == "tensorrt_llm"

    def test_the_pipeline_has_fields_of_usual_names(self, llms: GatewayProcess, name: str) -> None:
        described = httpx.get(f"{llms.url}/v1/pipelines/{name}").json()
        names = {each["name"] for each in described["parameters"]}
        assert (next(each["name"] for each in described["inputs"]), "max_tokens" in names) == ("prompt", True)
        answer = httpx.post(f"{llms.url}/v1/pipelines/{name}", json={"prompt": "Once", "max_tokens": 8}).json()
        assert answer["text"]

    def test_a_wrong_parameter_is_named(self, openai_client: OpenAI, name: str) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            openai_client.completions.create(model=name, prompt="Once", max_tokens=0)
        assert caught.value.param == "max_tokens"


def test_the_models_are_listed(openai_client: OpenAI) -> None:
    assert {each.id for each in openai_client.models.list()} == set(BACKENDS)


def test_vllm_counts_tokens(openai_client: OpenAI) -> None:
    answer = openai_client.completions.create(model="vllm", prompt="Once")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens > 0) == (7, True)


def test_several_choices_are_several_requests(openai_client: OpenAI, llms: GatewayProcess) -> None:
    answer = openai_client.completions.create(model="vllm", prompt="Once", n=3, seed=1)
    text = text_of_triton(llms, "vllm", "Once")
    assert [(each.index, each.text) for each in answer.choices] == [(0, text), (1, text), (2, text)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 7


def test_logprobs_of_vllm(openai_client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = openai_client.chat.completions.create(
        model="vllm",
        messages=messages,
        logprobs=True,
        top_logprobs=2,  # type: ignore[arg-type]
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
    assert {len(each.top_logprobs) for each in choice.logprobs.content} == {2}


def test_a_prompt_beyond_the_context_is_the_callers_error(openai_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.completions.create(model="vllm", prompt="x" * 5000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


class TestEmbeddings:
    def test_a_vector_for_each_text_in_order(self, embeddings: OpenAI) -> None:
        answer = embeddings.embeddings.create(model="embed", input=["a" * length for length in range(1, 101)])
        assert [each.embedding for each in answer.data] == [[length, 0.5, 0.5, 0.5] for length in range(1, 101)]
        assert answer.usage.prompt_tokens == sum(range(1, 101))

    def test_token_ids_in_place_of_texts(self, embeddings: OpenAI) -> None:
        one = embeddings.embeddings.create(model="embed", input=[7, 8])
        several = embeddings.embeddings.create(model="embed", input=[[7, 8], [9]])
        assert [each.embedding[0] for each in (*one.data, *several.data)] == [7, 7, 9]

    def test_dimensions(self, embeddings: OpenAI) -> None:
        assert len(embeddings.embeddings.create(model="embed", input="a", dimensions=2).data[0].embedding) == 2
        with pytest.raises(openai.BadRequestError) as caught:
            embeddings.embeddings.create(model="embed", input="a", dimensions=300)
        assert caught.value.param == "dimensions"


def test_check_compares_the_running_backends_with_the_presets(
    backends: EmbeddedTriton, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--triton", backends.grpc_url, "--format", "json"]) == 0
    found = {(each["model"], each["code"]): each["text"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert {model for model, _ in found} == {"tensorrt_llm", "tensorrt_llm_api"}, "the stand-in of vLLM is complete"
    assert "'num_input_tokens'" in found["tensorrt_llm", "preset-mismatch"]
    assert found["tensorrt_llm", "split-characters"].endswith("set accumulate_tokens: true")


def test_a_broken_tokenizer_is_found_by_check_and_ends_the_start(
    backends: EmbeddedTriton, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "llama" / "tokenizer.json").write_text(json.dumps({**TOKENIZER, "model": {"type": "WordLevel"}}))
    keys = {"model": "tensorrt_llm_api", "preset": "tensorrt_llm_api", "openai": {"chat": {"tokenizer": "llama"}}}
    config = tmp_path / "gateway.yaml"
    config.write_text(json.dumps({"pipelines": {"llm": keys}}))
    problem = "pipelines.llm.openai.chat.tokenizer cannot be used: tokenizer.json cannot be read: "
    assert main(["check", "--triton", backends.grpc_url, "--config", str(config)]) == 1
    assert problem in capsys.readouterr().out
    settings = {"triton_url": backends.grpc_url, "config": str(config)}
    with running_gateway(tmp_path / "gateway", ready=False, **settings) as gateway:
        assert gateway.process.wait(PATIENCE_S) == 2
        assert problem in gateway.log
