"""Pipelines over language models: the presets of backends, and the key ``openai:`` over the fields and the model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.config.mismatch import PipelineMismatch
from app.core.answer import Values
from app.core.errors import ContractViolation, InvalidInput
from app.core.inference import InferenceRequest, InferenceResponse, Tensor, bytes_array
from app.core.model import ModelConfig
from app.llm.tokenizer import read_folder
from app.pipelines.file import derived_spec
from app.pipelines.llm_spec import ChatSpec, OpenAISpec, recognized
from app.pipelines.pipeline import CompileContext, Pipeline
from app.pipelines.run import Collector
from tests.toolkit.models import model, pipeline, response, tensor

PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty")
FLAGS = ("return_finish_reason", "return_logprobs", "return_num_input_tokens", "return_num_output_tokens")
VLLM = model(
    [
        "text_input BYTES [1]",
        "image BYTES [-1] optional",
        "sampling_parameters BYTES [1] optional",
        *(f"{name} BOOL [1] optional" for name in ("stream", "exclude_input_in_output", *FLAGS)),
    ],
    [
        "text_output BYTES [-1]",
        "finish_reason BYTES [-1]",
        "logprobs BYTES [-1]",
        "num_input_tokens UINT32 [1]",
        "num_output_tokens UINT32 [-1]",
    ],
    backend="vllm",
    decoupled=True,
)
ENGINE = model(
    [
        "text_input BYTES [1]",
        "max_tokens INT32 [1]",
        *(f"{name} BYTES [-1] optional" for name in ("stop_words", "bad_words")),
        *(f"{name} FP32 [1] optional" for name in ("temperature", "top_p", *PENALTIES)),
        *(f"{name} INT32 [1] optional" for name in ("top_k", "min_tokens")),
        *(f"{name} UINT64 [1] optional" for name in ("seed", "lora_task_id")),
        *(f"guided_decoding_guide{rest} BYTES [1] optional" for rest in ("", "_type")),
        *(f"{name} BOOL [1] optional" for name in ("stream", "exclude_input_in_output", *FLAGS[2:])),
    ],
    ["text_output BYTES [-1]", "num_input_tokens INT32 [1]", "num_output_tokens INT32 [1]"],
    max_batch_size=8,
    decoupled=True,
)
LLM_API = model(
    [
        "text_input BYTES [-1]",
        "image_url BYTES [-1] optional",
        *(f"sampling_param_{name} INT32 [1] optional" for name in ("max_tokens", "top_k", "best_of")),
        *(f"sampling_param_{name} FP32 [1] optional" for name in ("temperature", "top_p", *PENALTIES[:2])),
        "sampling_param_stop BYTES [-1] optional",
        "sampling_param_seed UINT64 [1] optional",
        "sampling_param_exclude_input_from_output BOOL [1] optional",
        *(f"{name} BOOL [1] optional" for name in ("streaming", "stop", "return_finish_reason")),
    ],
    ["text_output BYTES [-1]", "finish_reason BYTES [-1]"],
    decoupled=True,
)
CONFIGS = {"vllm": VLLM, "tensorrt_llm": ENGINE, "tensorrt_llm_api": LLM_API}


def served(name: str, config: ModelConfig | None = None, **keys: Any) -> Pipeline:
    return pipeline(config or CONFIGS[name], preset=name, **keys)


def request(p: Pipeline, **fields: Any) -> InferenceRequest:
    return p.request_of_json(json.dumps({"prompt": "Hi", **fields}).encode())


def sent(p: Pipeline, **fields: Any) -> dict[str, Any]:
    """The values of the input tensors by name."""
    return {each.name: each.array.reshape(-1).tolist() for each in request(p, **fields).inputs}


def sampling(p: Pipeline, **fields: Any) -> Any:
    return json.loads(sent(p, **fields)["sampling_parameters"][0])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_recognized_by_its_tensors(name: str) -> None:
    assert recognized(CONFIGS[name]) == name
    derived = Pipeline("p", derived_spec("model"), CONFIGS[name], {}, CompileContext())
    assert (derived.spec.preset, next(field.name for field in derived.inputs)) == (name, "prompt")
    assert derived.openai.completions is not None
    assert recognized(model("text_input BYTES [1]", "text_output BYTES [1]")) is None


class TestVllm:
    def test_parameters_are_one_json_object(self) -> None:
        p = served("vllm")
        fields = {"temperature": 0.5, "stop": ["a", "b"], "seed": 2**62, "structured_outputs": {"choice": ["x"]}}
        assert sampling(p, **fields) == {"max_tokens": 1024, **fields, "structured_outputs": '{"choice":["x"]}'}
        names = {"stream", "exclude_input_in_output", *FLAGS}
        assert {name: sent(p)[name] for name in names} == {key: [True] for key in names}

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", -1),
            ("max_tokens", 0),
            ("top_p", 0),
            ("logprobs", 21),
            ("stop", [""]),
            ("stop_token_ids", ["a"]),
            ("structured_outputs", "json"),
            ("foo", 1),
            ("stream", False),
            ("lora_name", "x"),
        ],
    )
    def test_a_wrong_parameter_is_refused_with_its_name(self, field: str, value: Any) -> None:
        with pytest.raises(InvalidInput, match=f"'{field}") as caught:
            request(served("vllm"), **{field: value})
        assert [each.field.split("[")[0] for each in caught.value.errors] == [field]

    def test_an_image_is_sent_as_base64_without_its_data_url(self) -> None:
        png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNiAAAABgADNjd8qAAAAABJRU5ErkJggg=="
        assert sent(served("vllm"), images=[f"data:image/png;base64,{png}"])["image"] == [png.encode()]
        with pytest.raises(InvalidInput, match="is not an image"):
            request(served("vllm"), images=["aGVsbG8="])

    def test_answers_have_text_reason_and_counts(self) -> None:
        p = served("vllm")
        outputs = [("Hel", b"None", 1), ("lo", b"length", 2)]
        responses = [
            response(
                tensor("text_output", "BYTES", [text.encode()]),
                tensor("finish_reason", "BYTES", [reason]),
                tensor("logprobs", "BYTES", [b"null"]),
                tensor("num_input_tokens", "UINT32", 7),
                tensor("num_output_tokens", "UINT32", [count]),
                is_final=text == "lo",
            )
            for text, reason, count in outputs
        ]
        assert whole(p, responses) == {
            "text": "Hello",
            "finish_reason": "length",
            "logprobs": [],
            "prompt_tokens": 7,
            "completion_tokens": 3,
        }

    def test_an_adapter_sets_its_hidden_parameter(self) -> None:
        p = served("vllm", adapters={"french": {"lora_name": "fr-v2"}})
        assert sampling(p, adapter="french") == {"max_tokens": 1024, "lora_name": "fr-v2"}
        with pytest.raises(InvalidInput, match="'adapter' is not one of"):
            request(p, adapter="latin")

    def test_a_key_of_the_file_overrides_the_presets(self) -> None:
        p = served("vllm", parameters={"max_tokens": {"default": 64, "maximum": 100}})
        assert sampling(p)["max_tokens"] == 64
        with pytest.raises(InvalidInput):
            request(p, max_tokens=101)

    def test_what_the_model_lacks_is_omitted(self) -> None:
        lacking = model(
            ["text_input BYTES [1]", "sampling_parameters BYTES [1] optional"], "text_output BYTES [-1]", decoupled=True
        )
        p = served("vllm", lacking)
        assert sent(p).keys() == {"text_input", "sampling_parameters"}
        assert [field.name for field in p.outputs] == ["text"]
        assert (p.usage, p.openai.completions.openai.logprobs) == (None, None)

    @pytest.mark.parametrize(
        ("limits", "body_bytes"), [({}, 64 * 2**20), ({"queue": 3}, 64 * 2**20), ({"body_bytes": 9}, 9)]
    )
    def test_images_raise_the_limit_of_a_body(self, limits: dict[str, int], body_bytes: int) -> None:
        text_only = replace(VLLM, inputs=tuple(each for each in VLLM.inputs if each.name != "image"))
        assert served("vllm", limits=limits).spec.limits.body_bytes == body_bytes
        assert served("vllm", text_only, limits=limits).spec.limits.body_bytes == limits.get("body_bytes")


class TestTensorRtLlm:
    def test_parameters_are_tensors_of_the_batch(self) -> None:
        inputs = {each.name: each.array for each in request(served("tensorrt_llm"), stop=["a", "bc"]).inputs}
        assert inputs["stop_words"].tolist() == [[b"a", b"bc"]]
        tensors = sent(served("tensorrt_llm"), seed=2**62, temperature=0.5)
        assert (tensors["max_tokens"], tensors["seed"], tensors["temperature"]) == ([1024], [2**62], [0.5])
        assert (tensors["stream"], tensors["return_num_output_tokens"]) == ([True], [True])

    @pytest.mark.parametrize(("limit", "reason"), [(3, "length"), (4, "stop")])
    def test_the_finish_reason_follows_from_the_counts(self, limit: int, reason: str) -> None:
        p = served("tensorrt_llm")
        responses = [
            response(
                Tensor("text_output", "BYTES", bytes_array([b"x"], (1, 1))),
                tensor("num_output_tokens", "INT32", [[1]]),
                is_final=index == 2,
            )
            for index in range(3)
        ]
        collector = Collector(p, request(p, max_tokens=limit))
        reasons = [(collector.add(each) or {})["finish_reason"] for each in responses]
        assert reasons == [None, None, reason]
        assert whole(p, responses, max_tokens=limit)["completion_tokens"] == 3

    def test_a_model_that_does_not_stream_is_not_asked_to(self) -> None:
        config = ModelConfig("model", "ensemble", 8, ENGINE.inputs, ENGINE.outputs, decoupled=False)
        assert "stream" not in sent(served("tensorrt_llm", config))

    @pytest.mark.parametrize("value", ["true", "yes"])
    def test_a_script_that_accumulates_is_known_by_its_configuration(self, value: str) -> None:
        accumulates = (("accumulate_tokens", value),)
        config = ModelConfig(
            "model", "python", 8, ENGINE.inputs, ENGINE.outputs, decoupled=True, parameters=accumulates
        )
        assert next(field.spec.accumulates for field in served("tensorrt_llm", config).outputs)
        assert not served("tensorrt_llm").outputs[0].spec.accumulates


@pytest.fixture
def broken_tokenizer(tmp_path: Path) -> dict[str, Any]:
    """The key ``openai`` with a tokenizer folder whose ``tokenizer.json`` cannot be used."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    return {"chat": ChatSpec(tokenizer="llama").with_folder(read_folder(tmp_path))}


def test_a_broken_tokenizer_is_an_error_at_start(broken_tokenizer: dict[str, Any]) -> None:
    with pytest.raises(
        PipelineMismatch, match=r"^cannot be used: tokenizer\.json cannot be read: .*Model missing"
    ) as caught:
        served("tensorrt_llm_api", openai=broken_tokenizer)
    assert caught.value.location == ("openai", "chat", "tokenizer")


def test_the_tokenizer_is_not_read_if_the_model_counts(broken_tokenizer: dict[str, Any]) -> None:
    assert served("vllm", openai=broken_tokenizer).openai is not None


class TestLlmApi:
    def test_an_image_is_sent_as_a_data_url_with_its_own_media_type(self) -> None:
        p = served("tensorrt_llm_api")
        images = ["R0lGODlhAQ==", "data:application/octet-stream;base64,R0lGODlhAQ=="]
        assert sent(p, images=images)["image_url"] == [b"data:image/gif;base64,R0lGODlhAQ=="] * 2
        with pytest.raises(InvalidInput, match="is not an image"):
            request(p, images=["aGVsbG8="])
        assert p.spec.limits.body_bytes == 64 * 1024 * 1024
        tensors = sent(p, stop="x")
        assert (tensors["sampling_param_stop"], "stop" in tensors) == ([b"x"], False)  # `stop` cancels

    def test_texts_that_repeat_everything_become_pieces(self) -> None:
        p = served("tensorrt_llm_api")
        texts = ["", "He", "He said \ufffd", "He said \u00e9", "He said \u00e9"]
        responses = [answer(text, is_final=index == 4) for index, text in enumerate(texts)]
        collector = Collector(p, request(p))
        assert [(collector.add(each) or {})["text"] for each in responses] == ["", "He", " said ", "\u00e9", ""]
        assert whole(p, responses)["text"] == "He said \u00e9"
        assert whole(p, [answer("a\ufffd", is_final=True)])["text"] == "a\ufffd"  # stays incomplete

    def test_a_model_that_sends_only_new_text_is_a_violation(self) -> None:
        p = served("tensorrt_llm_api")
        collector = Collector(p, request(p))
        collector.add(answer("He", is_final=False))
        with pytest.raises(ContractViolation, match="does not begin with the text so far"):
            collector.add(answer(" said", is_final=False))


def answer(text: str, *, is_final: bool) -> InferenceResponse:
    reason = b"stop" if is_final else b"None"
    return response(
        tensor("text_output", "BYTES", [text.encode()]), tensor("finish_reason", "BYTES", [reason]), is_final=is_final
    )


def whole(p: Pipeline, responses: list[InferenceResponse], **fields: Any) -> Values:
    collected = Collector(p, request(p, **fields), is_whole=True)
    for each in responses:
        collected.add(each)
    return collected.finish().outputs[0]


class TestMembers:
    CONFIG = model(["REQUEST BYTES [1]", "OTHER BYTES [1] optional"], "TEXT BYTES [1]")

    def sent(self, value: int, **spec: Any) -> Any:
        p = pipeline(self.CONFIG, parameters={"size": {"type": "integer", "member_of": "REQUEST", **spec}})
        (given,) = p.request_of_json(json.dumps({"size": value}).encode()).inputs
        return json.loads(given.array.item())

    @pytest.mark.parametrize(
        ("member", "expected"),
        [
            (None, {"size": 3}),
            ("n", {"n": 3}),
            ("n[]", {"n": [3]}),
            ("outer.n", {"outer": {"n": 3}}),
            ("outer.n[]", {"outer": {"n": [3]}}),
        ],
    )
    def test_the_place_of_a_member(self, member: str | None, expected: Any) -> None:
        assert self.sent(3, **({} if member is None else {"member": member})) == expected

    @pytest.mark.parametrize("members", [("a", "a"), ("a", "a.b"), ("a.b", "a"), ("a.b", "a.b[]")])
    def test_two_parameters_for_one_member_are_refused(self, members: tuple[str, str]) -> None:
        parameters = {
            f"p{number}": {"type": "integer", "member_of": "REQUEST", "member": member}
            for number, member in enumerate(members)
        }
        with pytest.raises(PipelineMismatch, match="and so is another parameter"):
            pipeline(self.CONFIG, parameters=parameters)


def test_a_model_without_the_tensors_cannot_be_guided() -> None:
    lacking = model(["text_input BYTES [1]", "max_tokens INT32 [1]"], "text_output BYTES [-1]", decoupled=True)
    assert served("tensorrt_llm", lacking).openai.completions.guided_fields({"type": "object"}) == {}


WRITER = model(
    ["PROMPT BYTES [1]", "MANY BYTES [-1] optional"],
    ["TEXT BYTES [1]", "IDS INT32 [-1]", "WHY BYTES [1]", "COUNT INT32 [1]", "WORDS BYTES [-1]"],
    decoupled=True,
)
INPUTS = {"prompt": {"tensor": "PROMPT", "kind": "text"}, "many": {"tensor": "MANY", "kind": "text", "optional": True}}
OUTPUTS = {
    "text": {"tensor": "TEXT", "kind": "text"},
    "ids": {"tensor": "IDS"},
    "finish_reason": {"tensor": "WHY", "kind": "text", "join": "last"},
    "words": {"tensor": "WORDS", "kind": "text"},
}
PARAMETERS = {"max_new_tokens": {"type": "integer", "optional": True}, "seed": {"type": "integer", "optional": True}}
GUIDED = {"parameter": "structured_outputs"}
CHAT = {"template_text": "{{ messages[0].content }}"}
VECTORS = model("TEXT BYTES [1]", ["VECTOR FP32 [4]", "PAIRS FP32 [2,2]", "TOKENS INT32 [1]"], max_batch_size=8)


def writer(**openai: Any) -> Pipeline:
    return pipeline(WRITER, inputs=INPUTS, outputs=OUTPUTS, parameters=PARAMETERS, openai=openai)


def embedder(config: ModelConfig = VECTORS, embedding: str = "VECTOR", **openai: Any) -> Pipeline:
    inputs, outputs = {"text": {"tensor": "TEXT", "kind": "text"}}, {"embedding": {"tensor": embedding}}
    return pipeline(config, inputs=inputs, outputs=outputs, openai={"embeddings": {}, **openai})


def test_field_names_have_defaults_and_openai_parameters_map_to_fields() -> None:
    form = writer(completions={}, chat=CHAT, parameters={"max_tokens": "max_new_tokens"}).openai
    assert form.embeddings is None
    assert (form.completions.prompt, form.completions.text) == ("prompt", "text")
    assert form.completions.finish_reason == "finish_reason"
    assert form.completions.openai.usage is None
    assert form.chat.template is not None
    assert form.completions.field_by_parameter == {"many": "many", "seed": "seed", "max_tokens": "max_new_tokens"}
    assert form.chat.field_by_parameter["max_completion_tokens"] == "max_new_tokens"


def test_a_pipeline_with_embeddings() -> None:
    made = embedder(usage={"prompt_tokens": "TOKENS"})
    assert (made.openai.embeddings.length, made.usage is not None) == (4, True)


@pytest.mark.parametrize(
    ("openai", "location", "text"),
    [
        (
            {"completions": {"prompt": "promt"}},
            "completions.prompt",
            "'promt' is not an input of the pipeline; did you",
        ),
        ({"completions": {"prompt": "seed"}}, "completions.prompt", "'seed' is not an input of the pipeline"),
        ({"completions": {"prompt": "many"}}, "completions.prompt", "'many' must be a single text"),
        (
            {"completions": {"text": "txt"}},
            "completions.text",
            "'txt' is not an output of the pipeline; did you mean",
        ),
        ({"completions": {"text": "ids"}}, "completions.text", "'ids' must be a single text"),
        ({"chat": {"template_text": "{% if %}"}}, "chat.template_text", "is not a template: line 1: "),
        ({"chat": {**CHAT, "text": "words"}}, "chat.text", "'words' must be a single text"),
        ({"completions": {}, "finish_reason": "why"}, "finish_reason", "'why' is not an output of the pipeline"),
        (
            {"completions": {}, "parameters": {"max_tokens": "max_new"}},
            "parameters.max_tokens",
            "'max_new' is not an input or parameter of the pipeline; did you mean 'max_new_tokens'?",
        ),
        (
            {"completions": {}, "usage": {"prompt_tokens": "COUNTS"}},
            "usage.prompt_tokens",
            "'COUNTS' is not a tensor of the model; did you mean 'COUNT'?",
        ),
        (
            {"completions": {}, "usage": {"prompt_tokens": "COUNT", "completion_tokens": "TEXT"}},
            "usage.completion_tokens",
            "'TEXT' has datatype BYTES; an integer type is needed",
        ),
        (
            {"embeddings": {"input": "prompt", "embedding": "ids"}},
            "embeddings.embedding",
            "'ids' is not a list of floating-point numbers",
        ),
        (
            {"guided": {"parameter": "structured"}},
            "guided.parameter",
            "'structured' is not a parameter of the pipeline; d",
        ),
        ({"guided": {"parameter": "stop"}}, "guided.parameter", "'stop' must have type: object"),
        ({"guided": {**GUIDED, "also": {"seed": "x"}}}, "guided.also.seed", "has a value that does not fit"),
        ({"guided": {**GUIDED, "also": {"prompt": 1}}}, "guided.also.prompt", "'prompt' is not a parameter"),
    ],
)
def test_names_of_openai_that_do_not_match_are_reported_with_their_key(
    openai: dict[str, Any], location: str, text: str
) -> None:
    with pytest.raises(PipelineMismatch) as caught:
        served("vllm", openai=openai) if "guided" in openai else writer(**openai)
    assert ".".join(map(str, caught.value.location)) == f"openai.{location}"
    assert caught.value.text.startswith(text)


def test_only_vectors_of_one_response_are_embeddings() -> None:
    config = model("TEXT BYTES [1]", "VECTOR FP32 [4]", max_batch_size=4, decoupled=True)
    with pytest.raises(PipelineMismatch, match="requires a model that is not decoupled or does not batch"):
        embedder(config)
    with pytest.raises(PipelineMismatch, match="'embedding' is not a list of floating-point numbers"):
        embedder(embedding="PAIRS")


@pytest.mark.parametrize(
    ("openai", "text"),
    [
        ({}, "needs one of completions, chat and embeddings"),
        ({"chat": {}}, "needs exactly one of template, template_text and tokenizer"),
        ({"chat": {"template": "a", "template_text": "b"}}, "needs exactly one of template, template_text and"),
        ({"chat": {"template": "a", "tokenizer": "b"}}, "needs exactly one of template, template_text and tokenizer"),
        ({"chat": {"tokenizer": "b", "bos": "add"}}, "Input should be 'strip' or 'keep'"),
        ({"chat": CHAT, "tools": "gpt_oss"}, "tools: gpt_oss needs reasoning: gpt_oss"),
        ({"chat": CHAT, "tools": "hermes", "reasoning": "gpt_oss"}, "reasoning: gpt_oss needs tools: gpt_oss"),
        ({"chat": CHAT, "reasoning": ["<think>"]}, "List should have at least 2 items"),
        ({"chat": CHAT, "reasoning": ["<think>", ""]}, "String should have at least 1 character"),
        ({"completions": {}, "parameters": {"max_token": "x"}}, "Input should be 'max_tokens', 'temperature'"),
    ],
)
def test_invalid_keys_and_combinations_are_rejected(openai: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        OpenAISpec.model_validate(openai)
