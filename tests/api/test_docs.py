"""The documentation that the gateway serves: descriptions, samples, examples, graphs, error pages."""

import base64
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
import yaml

from app.api.bodies import Limits
from app.api.error_table import ERROR_BY_CODE, ROW_BY_ERROR
from app.api.pipelines.catalog_endpoints import graph_described, samples_of
from app.core.model import ModelConfig, Step
from app.pipelines.examples import body_of
from app.pipelines.pipeline import CompileContext, Pipeline
from app.pipelines.spec import GatewaySpec
from tests.api.conftest import PNG, READ, READER, WRITER, word
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, gateway_fixture, served
from tests.toolkit.models import model, pipeline


async def test_a_pipeline_describes_its_fields(api: Served) -> None:
    description = (await api.client.get("/v1/pipelines/read")).json()
    assert description["inputs"][0] == {
        "name": "image",
        "description": "",
        "kind": "image",
        "tensor": "IMAGE",
        "datatype": "BYTES",
        "shape": [1],
        "required": True,
        "default": None,
    }
    assert description["parameters"][0] == {
        "name": "n",
        "required": False,
        "type": "integer",
        "minimum": 1,
        "maximum": 9,
        "default": 3,
        "optional": False,
        "description": "",
    }
    assert [output["join"] for output in description["outputs"]] == [None, None]
    assert description["early_exit"] == ["no_text"]
    assert description["schemas"]["output_event"] is None
    streaming = (await api.client.get("/v1/pipelines/write")).json()
    assert [output["join"] for output in streaming["outputs"]] == ["concatenate", "list"]
    assert (description["streams"], streaming["streams"]) == (False, True)
    times = streaming["limits"]["stream"]
    assert (times["progress_s"], times["first_output_s"]) == (5, 5)
    for schema in filter(None, (*description["schemas"].values(), *streaming["schemas"].values())):
        jsonschema.Draft202012Validator.check_schema(schema)
        assert '"$ref"' not in json.dumps(schema)


class TestSamples:
    async def test_the_curl_sample_works_with_quotes_in_the_body(self, api: Served) -> None:
        api.engine.answers = [word(b"a", 1)]
        sample = (await api.client.get("/v1/pipelines/write")).json()["samples"]["curl"]
        curl, url, _, header, _, body = shlex.split(sample)
        name, _, value = header.partition(": ")
        answer = await api.client.post(url, content=body.encode(), headers={name: value})
        assert (curl, answer.status_code) == ("curl", 200)
        assert api.engine.requests[0].inputs[0].array.tolist() == [b"It's <here> & now"]

    @pytest.mark.parametrize(
        "host", ["x;$(touch pwned)", "x`id`", 'x"+alert(1)+"', "x'", "x y", "[", "a/b", "x:y", "", "-"]
    )
    async def test_an_invalid_host_is_not_repeated(self, api: Served, host: str) -> None:
        answer = await api.client.get("/v1/pipelines/write", headers={"Host": host})
        expected = "http://-/" if host == "-" else "http://gateway:None/"
        assert answer.status_code == 200
        assert shlex.split(answer.json()["samples"]["curl"])[1] == f"{expected}v1/pipelines/write"

    @pytest.mark.parametrize("host", ["gateway.example", "127.0.0.1:8080", "[::1]:8080"])
    @pytest.mark.parametrize(("scheme", "headers"), [("http", {}), ("https", {"X-Forwarded-Proto": "https"})])
    async def test_samples_use_the_host_of_the_request_and_the_scheme_of_a_trusted_proxy(
        self, api: Served, scheme: str, headers: dict[str, str], host: str
    ) -> None:
        url = f"{scheme}://{host}/v1/pipelines/write"
        samples = (await api.client.get("/v1/pipelines/write", headers={"Host": host} | headers)).json()["samples"]
        assert shlex.split(samples["curl"])[1] == url
        assert f'fetch("{url}"' in samples["javascript"]
        assert f"post('{url}'" in samples["python"]
        assert shlex.split(samples["curl_stream"])[:3] == ["curl", "-N", f"{url}/stream"]


FILES = pipeline(
    model(["A BYTES [1]", "B BYTES [1]", "T BYTES [1]", "N FP32 [2]"]),
    inputs={
        "a": {"tensor": "A", "kind": "image"},
        "b": {"tensor": "B", "kind": "binary"},
        "t": {"tensor": "T", "kind": "text"},
        "n": {"tensor": "N"},
    },
    sample={"a": "an image; type=x.png", "b": "b.bin", "t": "@/etc/passwd'", "n": [0.5, 1]},
)
BATCH = pipeline(
    model("A BYTES [1]", max_batch_size=2),
    inputs={"a": {"tensor": "A", "kind": "binary"}},
    batch=True,
    sample={"a": ["1.bin", "2.bin"]},
)
LARGE = pipeline(model("N FP32 [3,200]"), inputs={"n": {"tensor": "N", "minimum": 1}})


def test_samples_send_every_field_and_read_only_declared_files() -> None:
    samples = samples_of(FILES, "http://x")
    assert samples.keys() == {"curl", "javascript", "python"}
    compile(samples["python"], "sample", "exec")
    assert shlex.split(samples["curl"])[2:] == [
        *("-F", 'a=@"an image; type=x.png"', "-F", "b=@b.bin"),
        *("--form-string", "t=@/etc/passwd'", "--form-string", "n=[0.5, 1]"),
    ]
    for line in (
        '"a", await openAsBlob("an image; type=x.png")',
        '"b", await openAsBlob("b.bin")',
        '"n", "[0.5, 1]"',
    ):
        assert f"form.append({line}" in samples["javascript"]
    assert "files=[('a', open('an image; type=x.png', 'rb')), ('b', open('b.bin', 'rb'))]" in samples["python"]


def test_samples_of_a_batch_send_each_file_as_a_part(tmp_path: Path) -> None:
    samples = samples_of(BATCH, "http://x")
    assert shlex.split(samples["curl"])[2:] == ["-F", "a=@1.bin", "-F", "a=@2.bin"]
    assert samples["javascript"].count('form.append("a", await openAsBlob(') == 2
    assert "files=[('a', open('1.bin', 'rb')), ('a', open('2.bin', 'rb'))]" in samples["python"]
    for name, content in (("1.bin", b"one"), ("2.bin", b"two")):
        (tmp_path / name).write_bytes(content)
    request = BATCH.request_of_json(body_of(BATCH, {"a": ["1.bin", "2.bin"]}, tmp_path))
    assert request.inputs[0].array.tolist() == [[b"one"], [b"two"]]


def test_a_large_tensor_is_written_as_an_expression() -> None:
    samples = samples_of(LARGE, "http://x")
    assert max(map(len, samples.values())) < 300
    command, _, call = samples["curl"].partition(" | ")
    done = subprocess.run(shlex.split(command), capture_output=True, check=True)
    assert LARGE.request_of_json(done.stdout).inputs[0].shape == (3, 200)
    assert call.endswith(" -d @-")
    assert 'JSON.stringify({"n": Array(3).fill(Array(200).fill(1))})' in samples["javascript"]


async def addresses_on(api: Served, path: str) -> list[str]:
    return re.findall(r'\s(?:href|src)="([^"]+)"', (await api.client.get(path)).text)


async def test_the_list_of_errors_links_the_page_of_every_error(api: Served) -> None:
    listed = {each for each in await addresses_on(api, "/docs/errors") if each.startswith("/docs/errors/")}
    assert listed == {f"/docs/errors/{code}" for code in ERROR_BY_CODE}
    for code, error in ERROR_BY_CODE.items():
        answer = await api.client.get(f"/docs/errors/{code}")
        assert answer.status_code == 200
        assert code in answer.text
        assert str(ROW_BY_ERROR[error].status) in answer.text


@pytest.mark.parametrize("path", ["/docs", "/docs/errors"])
async def test_the_documentation_needs_no_internet(api: Served, path: str) -> None:
    addresses = await addresses_on(api, path)
    assert "/docs/assets/colours.css" in addresses
    assert not [address for address in addresses if "//" in address]
    for address in addresses:
        if not address.startswith("data:"):
            assert (await api.client.get(address, follow_redirects=True)).status_code == 200


CONFIG = """
pipelines:
  read:
    model: reader
    inputs: {image: {tensor: IMAGE, kind: image}, note: {tensor: NOTE, kind: text, optional: true}}
    early_exit: [{reason: no_text, error: {code: ALREADY_EXISTS, message: EXIT}}]
    sample: {image: pictures/sign.png}
    warmup: false
    examples:
      noted: {note: "<b>", image: pictures/sign.png}
      absent: {image: pictures/absent.png}
      large: {image: pictures/large.png}
      larger: {image: pictures/larger.png}
  write:
    model: writer
    inputs: {prompt: {tensor: PROMPT, kind: text}}
  gone:
    model: absent
    readiness: optional
    sample: {}
"""
BODY = {"image": base64.b64encode(PNG).decode()}
MAX_BODY_BYTES = 4096
NAMES = ["sample", "noted", "absent", "large", "larger"]


PICTURES = {"sign": 0, "large": MAX_BODY_BYTES, "larger": MAX_BODY_BYTES + 1}
IMAGES = {f"pictures/{name}.png": PNG.ljust(size, b"\0") for name, size in PICTURES.items()}
exemplary = gateway_fixture(CONFIG, READER, WRITER, answers=[READ], files=IMAGES, limits=Limits(MAX_BODY_BYTES))


@pytest.mark.parametrize(("name", "body"), [("sample", BODY), ("noted", BODY | {"note": "<b>"})])
async def test_an_example_is_a_request_that_can_be_sent_as_it_is(
    exemplary: Served, name: str, body: dict[str, str]
) -> None:
    answer = await exemplary.client.get(f"/v1/pipelines/read/examples/{name}")
    assert (answer.headers["content-type"], answer.json()) == ("application/json", body)
    sent = await exemplary.client.post(
        "/v1/pipelines/read", content=answer.content, headers={"Content-Type": "text/x+json"}
    )
    assert sent.status_code == 200
    assert exemplary.engine.requests[0].inputs[0].array.tolist() == [PNG]


async def test_the_description_and_the_document_list_the_examples(exemplary: Served) -> None:
    examples = (await exemplary.client.get("/v1/pipelines/read")).json()["examples"]
    assert [each["name"] for each in examples] == NAMES
    assert examples[0]["files"] == {"image": "pictures/sign.png"}
    assert (await exemplary.client.get("/v1/pipelines/write")).json()["examples"] == []
    paths = (await exemplary.client.get("/openapi.json")).json()["paths"]
    (parameter,) = paths["/v1/pipelines/read/examples/{example}"]["get"]["parameters"]
    assert parameter["schema"] == {"type": "string", "enum": NAMES}
    assert "/v1/pipelines/write/examples/{example}" not in paths


UNREADABLE = "A file of this example cannot be read; see the log for the cause."
LARGE_EXAMPLE = "This example is larger than GATEWAY_MAX_BODY_BYTES, so it cannot be sent."


@pytest.mark.parametrize(
    ("path", "code", "detail", "logged"),
    [
        ("read/examples/notd", "unknown_example", "The pipeline has no such example; did you mean 'noted'?", ""),
        ("write/examples/sample", "unknown_example", "The pipeline has no such example", ""),
        ("reed/examples/sample", "unknown_pipeline", "There is no such pipeline; did you mean 'read'?", ""),
        ("gone/examples/sample", "model_not_ready", "Pipeline 'gone' is not ready", ""),
        ("read/examples/..%2fsample", "not_found", "", ""),
        ("read/examples/absent", "unknown_example", UNREADABLE, "No such file or directory"),
        ("read/examples/larger", "unknown_example", UNREADABLE, "is larger than 4096 bytes"),
        ("read/examples/large", "unknown_example", LARGE_EXAMPLE, ""),
    ],
)
async def test_an_example_that_cannot_be_sent_is_an_error(
    exemplary: Served, caplog: pytest.LogCaptureFixture, path: str, *, code: str, detail: str, logged: str
) -> None:
    answer = await exemplary.client.get(f"/v1/pipelines/{path}")
    assert (answer.status_code, answer.json()["code"]) == (503 if code == "model_not_ready" else 404, code)
    assert answer.json()["detail"].startswith(detail)
    assert logged in caplog.text


@pytest.mark.parametrize(("missing_bytes", "statuses"), [(0, {200}), (1, {429})])
async def test_an_example_counts_as_a_body_until_it_is_sent(missing_bytes: int, statuses: set[int]) -> None:
    size = len(orjson.dumps({"PROMPT": "x"}))
    config = "pipelines: {write: {model: writer, examples: {short: {PROMPT: x}}}}"
    limits = Limits(MAX_BODY_BYTES, max_bytes_in_flight=size - missing_bytes)
    async with served(FakeEngine.of(WRITER), config, limits=limits) as exemplary:
        answers = [await exemplary.client.get("/v1/pipelines/write/examples/short") for _ in range(3)]
    assert {answer.status_code for answer in answers} == statuses


async def test_files_are_read_again_and_examples_are_reloaded_with_gateway_yaml(exemplary: Served) -> None:
    (exemplary.folder / "pictures" / "absent.png").write_bytes(b"GIF89a")
    answer = await exemplary.client.get("/v1/pipelines/read/examples/absent")
    assert answer.json() == {"image": base64.b64encode(b"GIF89a").decode()}
    config = exemplary.folder / "gateway.yaml"
    config.write_text(CONFIG.replace("noted:", "renamed:"))
    os.utime(config, (1, 1))
    catalog = exemplary.gateway.inference.catalog
    await catalog.refresh()
    await catalog.warm_up()
    assert (await exemplary.client.get("/v1/pipelines/read/examples/renamed")).json() == BODY | {"note": "<b>"}
    assert (await exemplary.client.get("/v1/pipelines/read/examples/noted")).status_code == 404


ERROR = {"code": "ALREADY_EXISTS", "message": "EARLY_EXIT[empty]"}
FIRST = model("X FP32 [-1]", "Y FP32 [-1]", name="first", instance_count=2, parameters=(("early_exits", "empty"),))
SECOND = model(
    ["Y FP32 [-1]", "W INT32 [1] optional"], "Z FP32 [-1]", name="second", parameters=(("bls_calls", "child"),)
)
CHILD = model("A FP32 [2]", "B FP32 [2]", name="child", max_batch_size=8)
CHAIN = ModelConfig(
    "chain",
    "ensemble",
    0,
    FIRST.inputs,
    SECOND.outputs,
    steps=(Step("first", "3", (("X", "X"),), (("Y", "t"),)), Step("second", "", (("Y", "t"),), (("Z", "Z"),))),
)


def chain(**spec: Any) -> dict[str, Any]:
    return graph_described(pipeline(CHAIN, FIRST, SECOND, CHILD, **spec))


def test_a_step_has_its_models_configuration_and_its_version() -> None:
    first, second = chain()["steps"]
    assert first == {
        "name": "first",
        "ensemble": "chain",
        "model": "first",
        "version": "3",
        "backend": "python",
        "decoupled": False,
        "max_batch_size": 0,
        "instances": 2,
        "inputs": [{"name": "X", "datatype": "FP32", "shape": (-1,), "optional": False}],
        "outputs": [{"name": "Y", "datatype": "FP32", "shape": (-1,), "optional": False}],
        "calls": [],
    }
    assert second["version"] is None
    assert [tensor["optional"] for tensor in second["inputs"]] == [False, True]
    (child,) = second["calls"]  # which the script declares
    assert (child["model"], child["max_batch_size"]) == ("child", 8)
    (only,) = graph_described(pipeline(FIRST, version="2"))["steps"]
    assert only["version"] == "2"


OTHER = {"reason": "other", "error": ERROR}


@pytest.mark.parametrize(
    ("rules", "exits"),
    [
        ([{"reason": "empty", "error": ERROR}, OTHER], [("first", "empty")]),
        (
            [{"reason": "none", "missing": ["Z"]}, {"reason": "nothing", "empty": ["Z"]}],
            [("second", "none"), ("second", "nothing")],
        ),
    ],
    ids=["the step that declares it", "the step that writes the output"],
)
def test_an_exit_leaves_a_step(rules: list[Any], exits: list[tuple[str, str]]) -> None:
    assert [(each["step"], each["reason"]) for each in chain(early_exit=rules)["exits"]] == exits
    alone = graph_described(pipeline(SECOND, CHILD, early_exit=[OTHER]))["exits"]
    assert alone == [{"step": "second", "reason": "other"}], "the only step needs to declare nothing"


STEPS = """
first: {model: first, inputs: {X: X}}
nothing: {when: {empty: first.Y}, exit: nothing}
unwanted: {when: {equals: [mode, none]}, exit: unwanted}
small: {model: second, when: {any: {below: [first.Y, 1]}}, inputs: {Y: first.Y}}
other: {model: second, inputs: {Y: X}, after: [nothing], optional: true}
both: {model: second, inputs: {Y: {first: [small.Z, other.Z]}}}
"""


def test_a_graph_has_the_conditions_and_exits_of_steps_and_an_edge_from_each_alternative() -> None:
    outputs = {"z": {"race": ["both.Z", "small.Z"]}}
    declared = {"steps": yaml.safe_load(STEPS), "outputs": outputs, "parameters": {"mode": {"type": "string"}}}
    spec = GatewaySpec.model_validate({"pipelines": {"p": declared}}).pipelines["p"]
    models = {each.name: each for each in (FIRST, SECOND, CHILD)}
    found = Pipeline("p", spec, spec.config_of("p", models), models, CompileContext())
    graph = graph_described(found)
    assert [*found.spec.reasons] == ["nothing", "unwanted"]
    keys = {
        each["name"]: {key: each[key] for key in ("when", "after", "optional") if key in each}
        for each in graph["steps"]
    }
    assert keys == {
        "first": {},
        "small": {"when": {"any": {"below": ["first.Y", 1]}}},
        "other": {"after": ["nothing"], "optional": True},
        "both": {},
    }
    ends = [(each["from"]["step"], each["to"]["step"], each["to"]["tensor"]) for each in graph["edges"]]
    assert [each for each in ends if each[1] == "both"] == [("small", "both", "Y"), ("other", "both", "Y")]
    assert [each[0] for each in ends if each[1] is None] == ["small", "both"]
    assert graph["exits"] == [
        {"step": "first", "reason": "nothing", "name": "nothing", "when": {"empty": "first.Y"}},
        {"step": None, "reason": "unwanted", "name": "unwanted", "when": {"equals": ["mode", "none"]}},
    ]
