"""Every kind of model of the table as a step, in every dialect, compared with Triton's own gRPC.

Each kind is the only step of a pipeline, for one item: of models with batches the gateway adds the dimension and takes
it away. With ``each``, every row of the request is an item. Then graphs of several kinds. `ZOO_SEED=7` repeats a run.
"""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from httpx_sse import EventSource

from app.codecs.kinds import declared_shape
from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.toolkit.processes import GatewayProcess, running_gateway, running_triton
from tests.toolkit.websocket_client import events_of, opened
from tests.zoo.cases import Case, DirectTriton, Tensor, Truth, random_case
from tests.zoo.dialects import Dialect, body_of, dialects_of, joined, oip_request, values_of
from tests.zoo.kinds import BY_NAME, KINDS, Kind
from tests.zoo.repository import pipelines_of, write_models
from tests.zoo.test_zoo import CACHE, SEED

AT_ONCE = 8
STEP = "call"
OF_A_MODEL = {"oip_binary", "oip_json", "oip_json_answer", "generate", "generate_stream"}
"""The dialects with the names of the model's tensors."""
ROWS = 9


def of_one_item(kind: Kind) -> Kind:
    """The pipeline: the fields are the tensors of the kind, without batches."""
    return replace(kind, name=f"{kind.name}_steps", batch=0, sample={})


def as_model(kind: Kind) -> Kind:
    """The pipeline as a model under /v2."""
    names = {f"{STEP}.{name}": form for name, form in kind.outputs.items()}
    return replace(of_one_item(kind), outputs=names, kinds={}, single=(), pipeline={})


def pipeline_of(kind: Kind) -> dict[str, Any]:
    (document,) = pipelines_of(of_one_item(kind)).values()
    del document["model"]
    outputs = {name: {**field, "tensor": f"{STEP}.{name}"} for name, field in document["outputs"].items()}
    document |= {"steps": {STEP: {"model": kind.name, "inputs": {name: name for name in kind.inputs}}}}
    if rules := document.get("early_exit"):
        document["early_exit"] = [{**rule, "missing": [f"{STEP}.{name}" for name in rule["missing"]]} for rule in rules]
    return document | {"outputs": outputs}


ALONE = [kind for kind in KINDS if not kind.heavy and kind.rows is None]
ROW_BY_ROW = [
    kind
    for kind in ALONE
    if not (kind.is_decoupled or kind.is_large or kind.fault) and len(kind.inputs) == 1
    if not any(any(form.is_free) for form in (kind.input_forms | kind.output_forms).values())
]
SCRIPT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.version, self.name = int(args["model_version"]), args["model_name"]

    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(each, "X").as_numpy(), each) for each in requests]

    def answer(self, x, request):
        if self.name == "script":
            names = {"model_name": "trees_batched", "requested_output_names": ["MARGIN"]}
            call = pb_utils.InferenceRequest(inputs=[pb_utils.Tensor("ROW", x)], **names)
            x = call.exec().output_tensors()[0].as_numpy()
        y = x.reshape(-1) if self.name == "flat" else x * self.version if self.name == "versions" else x
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])
"""
SCRIPTS = {
    # name -> max_batch_size, dims of X, dims of Y, further lines
    "flat": (4, "[1]", "[1]", ""),
    "versions": (0, "[-1]", "[-1]", "version_policy: { all {} }"),
    "script": (8, "[8]", "[1]", 'parameters { key: "bls_calls" value { string_value: "trees_batched" } }'),
}
GRAPHS: dict[str, Any] = yaml.safe_load("""
photos:  # two kinds as the ensemble `photo_search` has them, and that ensemble as a step
  inputs: {image: {tensor: IMAGE, kind: image}}
  steps:
    decode: {model: dali, inputs: {IMAGE: IMAGE}}
    vector: {model: pixels, inputs: {PIXELS: decode.PIXELS}}
    whole: {model: photo_search, inputs: {IMAGE: IMAGE}}
  outputs: {steps: {tensor: vector.VECTOR}, ensemble: {tensor: whole.VECTOR}}
vectors_of_a_story:  # a model for each response of a stream
  inputs: {prompt: {tensor: PROMPT, kind: text}}
  steps:
    story: {model: storyteller, inputs: {PROMPT: PROMPT}}
    vector: {model: embedder, inputs: {TEXT: story.TEXT}}
  outputs: {texts: {tensor: story.TEXT, kind: text, join: list}, vector: {tensor: vector.VECTOR}}
  stream: {progress_s: 300}
margins:  # rows as items of a model with batches, of a script that calls it, and of a model with flat outputs
  inputs: {rows: {tensor: ROWS}}
  steps:
    each: {model: trees_batched, each: ROWS, inputs: {ROW: ROWS}}
    script: {model: script, each: ROWS, inputs: {X: ROWS}}
    flat: {model: flat, each: each.MARGIN, inputs: {X: each.MARGIN}}
  outputs: {each: {tensor: each.MARGIN}, script: {tensor: script.Y}, flat: {tensor: flat.Y}}
first_version: {inputs: {x: {tensor: X}}, steps: {v: {model: versions, version: "1", inputs: {X: X}}}}
newest_version: {inputs: {x: {tensor: X}}, steps: {v: {model: versions, inputs: {X: X}}}}
chat:
  inputs: {prompt: {tensor: PROMPT, kind: text}}
  steps: {story: {model: storyteller, inputs: {PROMPT: PROMPT}}}
  outputs: {text: {tensor: story.TEXT, kind: text}}
  openai: {chat: {prompt: prompt, text: text, template_text: "{{ messages[-1].content }}"}}
  stream: {progress_s: 300}
vectors:
  inputs: {text: {tensor: TEXT, kind: text}}
  steps: {embed: {model: embedder, inputs: {TEXT: TEXT}}}
  outputs: {vector: {tensor: embed.VECTOR}}
  openai: {embeddings: {input: text, embedding: vector}}
""")


def write_scripts(folder: Path) -> None:
    for name, (batch, inputs, outputs, more) in SCRIPTS.items():
        for version in ("1", "2") if name == "versions" else ("1",):
            (folder / name / version).mkdir(parents=True)
            (folder / name / version / "model.py").write_text(SCRIPT)
        (folder / name / "config.pbtxt").write_text(
            f'name: "{name}"\nbackend: "python"\nmax_batch_size: {batch}\n{more}\n'
            f'input {{ name: "X" data_type: TYPE_FP32 dims: {inputs} }}\n'
            f'output {{ name: "Y" data_type: TYPE_FP32 dims: {outputs} }}\n'
        )


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    folder = tmp_path_factory.mktemp("zoo")
    write_models(folder, ALONE)
    write_scripts(folder)
    caches = next(models_venv.glob("lib/python3*/site-packages/pytriton/tritonserver/caches"))
    options = EmbeddedOptions(folder, models_venv, arguments=(CACHE, f"--cache-directory={caches}"))
    with running_triton(options) as triton:
        yield triton


@pytest.fixture(scope="module")
def direct(zoo: EmbeddedTriton) -> Iterator[DirectTriton]:
    triton = DirectTriton(zoo.grpc_url)
    yield triton
    triton.close()


@pytest.fixture(scope="module")
def gateway(zoo: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    pipelines = {of_one_item(kind).name: pipeline_of(kind) for kind in ALONE} | GRAPHS
    for kind in ROW_BY_ROW:
        (name,) = kind.inputs
        pipelines[f"{kind.name}_rows"] = {"steps": {STEP: {"model": kind.name, "each": name, "inputs": {name: name}}}}
    (folder / "gateway.yaml").write_text(
        yaml.safe_dump({"pipelines": pipelines, "oip": {"models": [*pipelines]}}, sort_keys=False)
    )
    settings = {
        "triton_url": zoo.grpc_url,
        "config": str(folder / "gateway.yaml"),
        "max_body_bytes": str(64 * 2**20),
        "shared_memory_bytes": str(256 * 2**20),
        "timeout_s": "60",
    }
    with running_gateway(folder, **settings) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        yield client


def item_of(kind: Kind, name: str, tensor: Tensor) -> Tensor:
    """A tensor of one item, in its declared form."""
    form = kind.input_forms.get(name) or kind.output_forms[name]
    array = tensor.array[0] if kind.batch else tensor.array
    shape = declared_shape(array.shape, tuple(form.dims or [1]))
    assert shape is not None, (kind.name, name, array.shape)
    return Tensor(tensor.datatype, array.reshape(shape))


def asked(direct: DirectTriton, kind: Kind, number: int) -> tuple[Case, Truth]:
    """A request for one item, and what Triton answers to it, without the batch dimension."""
    case = random_case(kind, Random(f"{SEED} {kind.name} steps {number}"), rows=1)
    truth = direct.answer(case)
    responses = [{name: item_of(kind, name, each) for name, each in found.items()} for found in truth.responses]
    inputs = {name: item_of(kind, name, each) for name, each in case.inputs.items()}
    return replace(case, inputs=inputs), replace(truth, responses=responses)


def in_dialect(client: httpx.Client, case: Case, truth: Truth, number: int, dialect: Dialect) -> None:
    is_of_model = dialect.__name__ in OF_A_MODEL
    named = replace(case, kind=(as_model if is_of_model else of_one_item)(case.kind))
    if is_of_model:
        truth = replace(truth, responses=[{f"{STEP}.{n}": each for n, each in r.items()} for r in truth.responses])
    try:
        dialect(client, named, truth, Random(f"{SEED} {named.kind.name} {number} {dialect.__name__}"))
    except Exception as exc:
        exc.add_note(f"ZOO_SEED={SEED}, {named.kind.name}, case {number}, dialect {dialect.__name__}: {case.inputs}")
        raise


@pytest.mark.parametrize("kind", ALONE, ids=lambda kind: kind.name)
def test_every_dialect_answers_as_triton(client: httpx.Client, direct: DirectTriton, kind: Kind) -> None:
    calls = []
    for number in range(2):
        case, truth = asked(direct, kind, number)
        dialects = dialects_of(replace(case, kind=of_one_item(kind)), heavy=False)
        calls += [partial(in_dialect, client, case, truth, number, dialect) for dialect in dialects]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(lambda call: call(), calls))


@pytest.mark.parametrize("kind", ROW_BY_ROW, ids=lambda kind: kind.name)
def test_each_row_is_an_item(client: httpx.Client, direct: DirectTriton, kind: Kind) -> None:
    """More rows than a batch of most kinds has, and none."""
    items = [asked(direct, kind, number) for number in range(ROWS)]
    (name,) = kind.inputs
    arrays = [case.inputs[name].array for case, _ in items]
    for rows in (ROWS, 0):
        tensor = Tensor(kind.input_forms[name].datatype, np.stack(arrays)[:rows])
        case = Case(replace(kind, name=f"{kind.name}_rows"), {name: tensor})
        body, headers = oip_request(case, binary_inputs=True, binary_outputs=False)
        answer = client.post(f"/v2/models/{kind.name}_rows/infer", content=body, headers=headers)
        assert answer.status_code == 200, answer.text[:500]
        for output in answer.json()["outputs"]:
            own = output["name"].removeprefix(f"{STEP}.")
            wanted = [each for _, truth in items[:rows] for each in values_of(truth.responses[0][own])]
            dims = kind.output_forms[own].dims or [1]
            assert (output["shape"], output["data"]) == ([rows, *dims], wanted)


@pytest.mark.parametrize("kind", [kind for kind in ALONE if not kind.is_large], ids=lambda kind: kind.name)
async def test_a_websocket_has_the_events_of_the_stream(
    gateway: GatewayProcess, client: httpx.Client, direct: DirectTriton, kind: Kind
) -> None:
    case, _ = await asyncio.to_thread(asked, direct, kind, 0)
    name, body = of_one_item(kind).name, body_of(replace(case, kind=of_one_item(kind)), batch=False)
    posted = await asyncio.to_thread(client.post, f"/v1/pipelines/{name}/stream", json=body)
    events = [] if posted.is_error else outputs_of(posted)
    async with opened(gateway, name) as socket:
        await socket.send(json.dumps(body))
        found = await events_of(socket, 1)
    assert [data for event, data in found if event == "output"] == events
    assert found[-1][0] == ("error" if posted.is_error or "event: error" in posted.text else "done")


def outputs_of(answer: httpx.Response) -> list[Any]:
    return [each.json() for each in EventSource(answer).iter_sse() if each.event == "output"]


def vector_of(direct: DirectTriton, text: str) -> list[float]:
    tensor = Tensor("BYTES", np.array([[text.encode()]], np.object_))
    truth = direct.answer(Case(BY_NAME["embedder"], {"TEXT": tensor}))
    return truth.responses[0]["VECTOR"].array[0].tolist()  # type: ignore[no-any-return]


def test_an_ensemble_as_a_step_and_its_models_as_steps_are_equal(client: httpx.Client, direct: DirectTriton) -> None:
    case, truth = asked(direct, BY_NAME["photo_search"], 0)
    content = case.inputs["IMAGE"].array.item()
    found = client.post("/v1/pipelines/photos", content=content, headers={"content-type": "image/png"}).json()
    assert found["steps"] == found["ensemble"] == truth.responses[0]["VECTOR"].array.tolist()


def test_rows_of_models_scripts_and_flat_outputs(client: httpx.Client) -> None:
    """``flat`` writes [B] for the declared [B, 1]."""
    rows = np.random.default_rng(SEED).integers(-9, 9, (70, 8)).astype(float).tolist()
    found = client.post("/v1/pipelines/margins", json={"rows": rows}).json()
    assert found["each"] == found["script"] == found["flat"]
    assert len(found["each"]) == 70
    assert client.post("/v1/pipelines/margins", json={"rows": rows[:1]}).json()["each"] == found["each"][:1]


def test_a_model_runs_for_each_response_of_a_stream(client: httpx.Client, direct: DirectTriton) -> None:
    body = {"prompt": f"a story {SEED}"}
    events = outputs_of(client.post("/v1/pipelines/vectors_of_a_story/stream", json=body))
    assert all(each["vector"] == vector_of(direct, each["texts"]) for each in events)
    whole = client.post("/v1/pipelines/vectors_of_a_story", json=body).json()
    assert whole["texts"] == [each["texts"] for each in events]


@pytest.mark.parametrize(("name", "factor"), [("first_version", 1), ("newest_version", 2)])
def test_a_step_may_name_a_version(client: httpx.Client, name: str, factor: int) -> None:
    answer = client.post(f"/v1/pipelines/{name}", json={"x": [1, 2]})
    assert answer.json() == {"v.Y": [1.0 * factor, 2.0 * factor]}, answer.text


def test_chat_and_embeddings_of_steps(client: httpx.Client, direct: DirectTriton) -> None:
    case, truth = asked(direct, BY_NAME["storyteller"], 0)
    prompt = case.inputs["PROMPT"].array.item().decode()
    text = joined(of_one_item(BY_NAME["storyteller"]), truth, batch=False)["TEXT"]
    request = {"model": "chat", "messages": [{"role": "user", "content": prompt}]}
    chat = client.post("/v1/chat/completions", json=request)
    assert chat.json()["choices"][0]["message"]["content"] == text
    texts = ["one", "two and more", ""]
    answer = client.post("/v1/embeddings", json={"model": "vectors", "input": texts})
    assert [each["embedding"] for each in answer.json()["data"]] == [vector_of(direct, text) for text in texts]
