"""Requests under ``/v2`` with a scripted engine: valid requests reach it, invalid requests do not."""

import asyncio
import gzip
import json
import threading
import tracemalloc
import zlib
from typing import Any

import httpx
import numpy as np
import pytest

from app.api.bodies import MAX_SILENT_BYTES, READ_BYTES, Limits, inflated
from app.api.exchange import ByteBudget
from app.core.errors import InvalidRequest, PayloadTooLarge, TooManyRequests, UpstreamUnavailable
from app.core.inference import RequestedOutput
from tests.toolkit.engine import FakeEngine
from tests.toolkit.exchange import exchange_with
from tests.toolkit.gateway import Served, gateway_fixture, served
from tests.toolkit.keys import bearer, entry
from tests.toolkit.models import model, response, tensor

ECHO = model(["X FP32 [-1]", "N BYTES [1] optional"], ["Y FP32 [-1]", "T BYTES [-1]", "C FP32 [4]"], name="echo")
INFER = "/v2/models/echo/infer"
ANSWER = response(tensor("Y", "FP32", [0.5, 2.0]), tensor("T", "BYTES", [b"a", b"\xff"]))
LIMITS = Limits(1024 * 1024, max_bytes_in_flight=4 * 1024 * 1024)


api = gateway_fixture("pipelines: {echo: {model: echo, warmup: false}}\n", ECHO, answers=[ANSWER], limits=LIMITS)


def x(**changed: Any) -> dict[str, Any]:
    return {"name": "X", "datatype": "FP32", "shape": [2], "data": [1, 2], **changed}


def error_of(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    return answer.status_code, answer.json()["error"]


async def infer(api: Served, *inputs: dict[str, Any], **more: Any) -> httpx.Response:
    return await api.client.post(INFER, json={"inputs": list(inputs), **more})


async def test_a_request_reaches_triton_with_an_id_of_the_gateway(api: Served) -> None:
    classes = {"name": "C", "parameters": {"classification": 3}}
    body = {"id": "mine", "inputs": [x()], "parameters": {"a": 1}, "outputs": [{"name": "Y"}, classes]}
    answer = await api.client.post("/v2/models/echo/versions/07/infer", json=body)
    assert answer.json()["id"] == "mine"
    (sent,) = api.engine.requests
    assert (sent.model, sent.version, sent.parameters) == ("echo", "7", {"a": 1})
    assert sent.outputs == (RequestedOutput("Y"), RequestedOutput("C", 3))
    assert sent.inputs[0].array.tolist() == [1, 2]
    assert "mine" not in sent.request_id


WITH_LITERALS = b'{"id": "NaN", "inputs": [{"name": "X", "data": [NaN, -Infinity], "datatype": "FP32", "shape": [2]}]}'


async def test_an_incomplete_body_with_literals_is_refused(api: Served) -> None:
    for end in range(1, len(WITH_LITERALS)):
        answer = await api.client.post(INFER, content=WITH_LITERALS[:end])
        assert error_of(answer) == (400, "failed to parse the request JSON buffer: it is not JSON.")
    assert api.engine.requests == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"data"', b'"d\\u0061ta"'),
        (b'"data"', b'"Data": 1, "data": 0, "d\\u0061ta"'),
        (b"[NaN, -Infinity]", b"[NaN, [[[-Infinity]]]]"),
        (b"[NaN, -Infinity]", b"[" * 100_000),
        (b"[NaN, -Infinity]", b"{"),
        (b"}]}", b"}]}}"),
        (b"}]}", b"},]}"),
        (b"}]}", b", NaN}]}"),
        (b"}]}", b"}]} NaN"),
        (b"}]}", b', "data": 5}]}'),
        (b"[2]", b"NaN"),
        (b'"id"', b"NaN"),
    ],
)
async def test_literals_anywhere_else_are_refused(api: Served, old: bytes, new: bytes) -> None:
    body = WITH_LITERALS.replace(old, new)
    assert body != WITH_LITERALS
    assert (await api.client.post(INFER, content=body)).status_code == 400
    assert api.engine.requests == []


async def test_a_version_of_thousands_of_digits_is_404(api: Served) -> None:
    """Python does not convert so many digits."""
    for method, end in (("POST", "/infer"), ("POST", "/generate"), ("GET", ""), ("GET", "/config")):
        answer = await api.client.request(method, f"/v2/models/echo/versions/{'9' * 5000}{end}")
        assert answer.status_code == 404
        assert answer.json()["error"].startswith("Request for unknown model: 'echo' version 999")


@pytest.mark.parametrize(
    "shape",
    [[2**62], [2**62, 4], [-1], [2**63], [2**31, 2**31], [2**31] * 3, [0, 2**62], [1] * 40, ["2"], [2.0], 2, None],
)
async def test_an_invalid_shape_never_reaches_triton(api: Served, shape: Any) -> None:
    """A shape of 2**62 elements without data crashes a model's process in Triton 2.51."""
    raw = {"name": "X", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": 0}}
    for tensor_ in (x(shape=shape, data=[]), raw):
        assert (await infer(api, tensor_)).status_code == 400
    assert api.engine.requests == []


@pytest.mark.parametrize(
    "parameters",
    [
        {"triton_x": 1},
        {"shared_memory_region": "a"},
        {"headers": "a"},
        {"traceparent": "a"},
        {"classification": 1},
        {"binary_data": True},
        {"priority": "high"},
        {"priority": -1},
        {"timeout": 1.5},
        {"sequence_start": 1},
        {"sequence_id": -1},
        {"a": 2**63},
        {"a": -1e19},
        {"a": "x" * 5000},
        {"x" * 200: 1},
        {"": 1},
        {"a\0b": 1},
        {"\n": 1},
        {"\u00fc": 1},
        {"a": "b\0c"},
        {"sequence_id": "x" * 129},
        dict.fromkeys(map(str, range(65)), 1),
    ],
)
async def test_a_forbidden_parameter_never_reaches_triton(api: Served, parameters: dict[str, Any]) -> None:
    status, text = error_of(await infer(api, x(), parameters=parameters))
    assert status == 400
    assert "x" * 65 not in text
    assert api.engine.requests == []


async def test_an_optional_input_does_not_replace_a_required_input(api: Served) -> None:
    text = {"name": "N", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    missing = "missing required input(s) ['X']. Please provide all required input(s)."
    assert error_of(await infer(api, text))[1].endswith(missing)
    assert api.engine.requests == []


CANARY = "canary\n\u202e7" + "z" * 100
SHOWN = "canary??7" + "z" * 55


@pytest.mark.parametrize(
    ("inputs", "more"),
    [
        ([x(name=CANARY)], {}),
        ([x(parameters={"shared_memory_region": CANARY})], {}),
        ([x()], {"outputs": [{"name": CANARY}]}),
        ([x()], {"parameters": {f"triton_{CANARY}"[7:]: 1}}),
        ([x()], {"parameters": {CANARY: None}}),
    ],
)
async def test_an_error_names_what_it_is_about(api: Served, inputs: list[Any], more: dict[str, Any]) -> None:
    """A name is shortened and has no control characters."""
    status, text = error_of(await infer(api, *inputs, **more))
    assert (status, SHOWN[:9] in text, text.isprintable(), "z" * 65 in text) == (400, True, True, False)


async def test_an_error_never_repeats_a_value(api: Served) -> None:
    canary = "canary7"
    for tensor_ in (x(datatype=canary), x(data=[canary]), x(shape=[canary]), x()):
        for parameters in ({}, {"a": canary + "\0"}, {"sequence_start": canary}, {"sequence_id": canary * 20}):
            assert canary not in (await infer(api, tensor_, parameters=parameters)).text
    for body in ({"X": canary}, {"X": [canary]}, {"X": 1, "id": [canary]}, {"X": 1, "a": [canary]}):
        assert canary not in (await api.client.post("/v2/models/echo/generate", json=body)).text


async def test_binary_tensors_are_not_copied(api: Served) -> None:
    """Only small elements of a BYTES tensor are copied."""
    raw = np.arange(2, dtype=np.float32).tobytes()
    text = b"y" * 5000
    head = json.dumps(
        {
            "inputs": [
                {"name": "X", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}},
                {"name": "N", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5004}},
            ]
        }
    ).encode()
    body = head + raw + len(text).to_bytes(4, "little") + text
    answer = await api.client.post(INFER, content=body, headers={"Inference-Header-Content-Length": str(len(head))})
    assert answer.status_code == 200
    numbers, texts = (each.array for each in api.engine.requests[0].inputs)
    assert numbers.tolist() == [0, 1]
    assert not numbers.flags.owndata
    assert isinstance(texts[0], memoryview)
    assert bytes(texts[0]) == text


@pytest.mark.parametrize("length", ["0" * 5000, "99999", "1" * 19, "-5", "abc", "0x10", "1.0", "", "\u00b2"])
async def test_an_invalid_length_header_is_400(api: Served, length: str) -> None:
    sent = {"Inference-Header-Content-Length": length.encode("latin-1")}
    answer = await api.client.post(INFER, content=json.dumps({"inputs": [x()]}), headers=sent)
    assert error_of(answer)[0] == 400
    assert "inference header size" in error_of(answer)[1]


async def test_answers_mix_json_and_binary_tensors(api: Served) -> None:
    answer = await infer(api, x(), outputs=[{"name": "Y", "parameters": {"binary_data": True}}, {"name": "T"}])
    size = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.content[:size])["outputs"] == [
        {"name": "Y", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}},
        {"name": "T", "datatype": "BYTES", "shape": [2], "data": ["a", "\ufffd"]},
    ]
    assert answer.content[size:] == np.array([0.5, 2], np.float32).tobytes()


@pytest.mark.parametrize("size", [4, 20_000])
async def test_a_json_answer_has_null_for_nan_and_infinity(api: Served, size: int) -> None:
    numbers = np.random.default_rng(3).random(size, np.float32)
    special = response(tensor("Y", "FP32", [np.nan, np.inf, *numbers]), tensor("T", "BYTES", [b"a"]))
    api.engine.answers = [special]
    outputs = {each["name"]: each["data"] for each in (await infer(api, x())).json()["outputs"]}
    assert outputs["Y"][:2] == [None, None]
    assert np.array_equal(np.array(outputs["Y"][2:], np.float32), numbers)
    assert outputs["T"] == ["a"]


async def test_a_reloaded_model_changes_the_accepted_requests(api: Served) -> None:
    assert (await infer(api, x())).status_code == 200
    api.engine.configs["echo"] = model("X INT32 [2]", "Y FP32 [-1]", name="echo")
    await api.gateway.inference.catalog.follow_models()
    assert (await infer(api, x())).status_code == 400
    assert (await infer(api, x(datatype="INT32"))).status_code == 200
    document = (await api.client.get("/openapi.json")).json()
    described = document["components"]["schemas"]["echo_infer"]["properties"]["inputs"]["items"]
    assert described["properties"]["datatype"] == {"type": "string", "const": "INT32"}


async def test_errors_of_the_gateway_keep_their_statuses(api: Served) -> None:
    api.engine.answers = [UpstreamUnavailable("Triton cannot be reached.")]
    answer = await infer(api, x())
    assert (error_of(answer), answer.headers["retry-after"]) == ((503, "Triton cannot be reached."), "1")
    assert error_of(await api.client.post(INFER, content=b" " * 2 * 1024 * 1024))[0] == 413
    answer = await api.client.post(INFER, content=b"{}", headers={"Content-Encoding": "br"})
    assert error_of(answer)[0] == 415
    api.gateway.inference.catalog.oip_models.expose(["echo", "later"], [])
    assert error_of(await api.client.post("/v2/models/later/infer", json={}))[0] == 503, "it is not loaded"
    api.gateway.inference.workload.start_draining()
    assert error_of(await infer(api, x()))[0] == 503


class WatchedInflater:
    """zlib's, which notes the thread and the size of each call."""

    calls: list[tuple[threading.Thread, int]]
    new = zlib.decompressobj

    def __init__(self, wbits: int) -> None:
        self._inflater = WatchedInflater.new(wbits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inflater, name)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        WatchedInflater.calls.append((threading.current_thread(), len(data)))
        return self._inflater.decompress(data, max_length)


def empty_blocks(size: int) -> memoryview:
    """Returns a zlib stream of blocks without content (RFC 1951, section 3.2.4), without its end."""
    return memoryview((zlib.compress(b"")[:2] + b"\x00\x00\x00\xff\xff" * (size // 5 + 1))[:size])


class TestInflating:
    def exchange(self, limits: Limits = LIMITS) -> Any:
        return exchange_with(budget=ByteBudget(limits.max_bytes_in_flight))

    @pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
    @pytest.mark.parametrize("size", [0, 1, 65_536, 131_072, 1_000_000])
    async def test_the_content_is_decompressed(self, compress: Any, size: int) -> None:
        content = np.random.default_rng(size).integers(0, 8, size, np.uint8).tobytes()
        assert await inflated(self.exchange(), memoryview(compress(content)), LIMITS) == content

    async def test_decompression_stops_at_the_body_limit(self) -> None:
        bomb = memoryview(gzip.compress(b"\0" * 512 * 1024 * 1024, 9))
        tracemalloc.start()
        with pytest.raises(PayloadTooLarge):
            await inflated(self.exchange(), bomb, LIMITS)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 3 * LIMITS.max_body_bytes

    async def test_the_content_counts_against_the_budget(self) -> None:
        limits = Limits(1024 * 1024, max_bytes_in_flight=300_000)
        with pytest.raises(TooManyRequests):
            await inflated(self.exchange(limits), memoryview(gzip.compress(b"\0" * 500_000)), limits)

    async def test_a_damaged_body_or_bytes_after_its_end_are_400(self, api: Served) -> None:
        whole = gzip.compress(json.dumps({"inputs": [x()]}).encode())
        empty = gzip.compress(b"{}")
        for body in (whole[:-6], whole[:5], whole[8:], empty + b"x", empty * 2, empty + b"\0" * 70_000):
            answer = await api.client.post(INFER, content=body, headers={"Content-Encoding": "gzip"})
            assert error_of(answer) == (400, "The body does not match its Content-Encoding.")

    async def test_other_requests_run_while_a_body_is_inflated(self) -> None:
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        await inflated(self.exchange(), memoryview(gzip.compress(bytes(1_000_000))), LIMITS)
        ticking.cancel()
        assert turns > 3

    @pytest.mark.parametrize("size", [READ_BYTES, READ_BYTES + 1])
    async def test_a_large_compressed_body_is_inflated_in_a_thread_from_the_start(
        self, monkeypatch: pytest.MonkeyPatch, size: int
    ) -> None:
        monkeypatch.setattr("app.api.bodies.zlib.decompressobj", WatchedInflater)
        WatchedInflater.calls = []
        with pytest.raises(InvalidRequest):
            await inflated(self.exchange(), empty_blocks(size), LIMITS)
        threads = {thread is threading.main_thread() for thread, _ in WatchedInflater.calls}
        assert threads == {size <= READ_BYTES}

    async def test_a_body_without_content_is_400_before_its_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("app.api.bodies.zlib.decompressobj", WatchedInflater)
        WatchedInflater.calls = []
        with pytest.raises(InvalidRequest):
            await inflated(self.exchange(), empty_blocks(8 * 1024 * 1024), LIMITS)
        assert sum(size for _, size in WatchedInflater.calls) <= MAX_SILENT_BYTES + READ_BYTES

    async def test_a_long_gzip_header_is_accepted(self) -> None:
        extra = b"\xff\xff" + bytes(65_535)
        body = b"\x1f\x8b\x08\x04" + bytes(6) + extra + gzip.compress(b"content")[10:]
        assert await inflated(self.exchange(), memoryview(body), LIMITS) == b"content"


@pytest.mark.parametrize(("others", "is_idempotent"), [("", True), ("  q: {model: echo}\n", False)])
async def test_a_model_is_idempotent_if_all_its_pipelines_are(others: str, is_idempotent: bool) -> None:
    config = f"pipelines:\n  p: {{model: echo, idempotent: true}}\n{others}"
    async with served(FakeEngine.of(ECHO, answers=[ANSWER]), config, limits=LIMITS) as gateway:
        await infer(gateway, x())
        assert gateway.engine.requests[0].idempotent is is_idempotent


@pytest.mark.parametrize(("listed", "shown"), [("all", ["echo", "one"]), ("[one]", ["one"]), ("[]", [])])
async def test_a_pipeline_with_steps_is_a_model_if_oip_has_its_name(listed: str, shown: list[str]) -> None:
    """Its key names the pipeline, and allows no model of its steps."""
    config = f"pipelines: {{one: {{steps: {{a: {{model: echo, inputs: {{X: X}}}}}}}}}}\noip: {{models: {listed}}}\n"
    keys = [entry("all"), entry("one", pipelines=["one"])]
    async with served(FakeEngine.of(ECHO), config, keys=keys) as api:
        index = await api.client.post("/v2/repository/index", headers=bearer("all"))
        assert [each["name"] for each in index.json()] == shown
        status = 200 if "one" in shown else 404
        for document in ("", "/config", "/stats"):
            found = await api.client.get(f"/v2/models/one{document}", headers=bearer("one"))
            assert found.status_code == status
            assert (await api.client.get(f"/v2/models/echo{document}", headers=bearer("one"))).status_code == 403
        described = (await api.client.get("/openapi.json", headers=bearer("all"))).json()["paths"]
        assert ("/v2/models/one/infer" in described) is (status == 200)


async def test_a_pipeline_with_steps_is_ready_while_its_models_are() -> None:
    config = "pipelines: {one: {steps: {a: {model: echo, inputs: {X: X}}}}}\noip: {models: [one]}\n"
    async with served(engine := FakeEngine.of(ECHO), config) as api:
        for is_ready, status in ((True, 200), (False, 400), (True, 200)):
            engine.unready = set() if is_ready else {"echo"}
            await api.gateway.inference.catalog.refresh()
            assert (await api.client.get("/v2/models/one/ready")).status_code == status
            assert (await api.client.get("/v2/models/one/versions/2/ready")).status_code == 400


async def test_a_pipeline_that_loses_its_steps_is_no_model_any_more() -> None:
    config = "pipelines: {{one: {}}}\noip: {{models: [one]}}\n"
    steps = "{steps: {a: {model: echo, inputs: {X: X}}}}"
    async with served(FakeEngine.of(ECHO), config.format(steps)) as api:
        for pipeline, status in ((steps, 400), ("{model: echo, warmup: false}", 503), (steps, 400)):
            (api.folder / "gateway.yaml").write_text(config.format(pipeline))
            await api.gateway.inference.catalog.refresh()
            infer = await api.client.post("/v2/models/one/infer", json={"inputs": [x(), x()]})
            assert infer.status_code == status, infer.text
