"""Compares ``/v2/models/{model}/infer`` with the HTTP endpoint of Triton: tensors, statuses and NVIDIA's client."""

import json
import struct
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from tritonclient import http
from tritonclient.http import aio

from app.core.inference import DTYPE_BY_DATATYPE
from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.side_by_side import Answer, Both, answer_of, both_at, raw_texts, with_binary
from tests.toolkit.processes import GatewayProcess, StartGateway
from tests.toolkit.waiting import eventually

TYPED = "/v2/models/typed_echo/infer"
BATCHED = "/v2/models/batched_echo/infer"
RAW = np.array([1, 2, 3], np.float32).tobytes()

WITHOUT_JSON_IN_TRITON = {"FP16": [0.5, -65504.0], "BF16": [0.5, -3.0]}


@pytest.fixture(scope="module")
def both(triton: EmbeddedTriton, gateway: GatewayProcess) -> Iterator[Both]:
    with both_at(triton.http_url, gateway.url) as clients:
        yield clients


def tensor_of(datatype: str, **more: Any) -> dict[str, Any]:
    return {"name": datatype, "datatype": datatype, "shape": [1, 2], **more}


def binary_size(size: int) -> dict[str, Any]:
    return {"parameters": {"binary_data_size": size}}


def input_x(**changed: Any) -> dict[str, Any]:
    return {"name": "X", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3], **changed}


def same_answer(both: Both, path: str, body: bytes, **headers: str) -> Answer:
    """Checks that the answers of Triton and the gateway are the same, and returns the answer."""
    theirs, ours = both.post(path, body, **headers)
    assert (theirs.status_code, ours.status_code) == (200, 200), (theirs.content[:300], ours.content[:300])
    assert answer_of(ours) == answer_of(theirs)
    assert ours.headers["content-type"] == theirs.headers["content-type"]
    assert ours.headers.get("inference-header-content-length") is None or theirs.headers.get(
        "inference-header-content-length"
    )
    return answer_of(ours)


class TestDatatypes:
    def test_half_precision_is_allowed_in_json(self, both: Both) -> None:
        for datatype, values in WITHOUT_JSON_IN_TRITON.items():
            body = json.dumps({"inputs": [tensor_of(datatype, data=values)]}).encode()
            theirs, ours = both.post(TYPED, body)
            assert (theirs.status_code, ours.status_code) == (400, 200)
            assert answer_of(ours).tensors[f"{datatype}_OUT"][2] == values

    @pytest.mark.parametrize("datatype", ["FP32", "FP64"])
    @pytest.mark.parametrize("literal", ["NaN", "-Infinity", " -NaN ", "\nInf\t"])
    def test_data_of_floats_may_have_literals(self, both: Both, datatype: str, literal: str) -> None:
        echoed = (
            f'{{"name": "{datatype}", "datatype": "{datatype}", "shape": [2, 2], "data": [[1, {literal}],[0.5,2]]}}'
        )
        text = '{"name": "BYTES", "datatype": "BYTES", "shape": [1, 1], "data": ["NaN, [NaN] \\" NaN"]}'
        outputs = ", ".join(f'{{"name": "{each}_OUT"}}' for each in (datatype, "BYTES"))
        body = f'{{"inputs": [{text}, {echoed}], "outputs": [{outputs}], "parameters": {{}}}}'.encode()
        theirs, ours = both.post(TYPED, body)
        assert (theirs.status_code, ours.status_code) == (200, 200), ours.content
        binary = body.replace(b'"parameters": {}', b'"parameters": {"binary_data_output": true}')
        binary = binary.replace(f', "outputs": [{outputs}]'.encode(), b"")
        expected, found = (answer_of(each) for each in both.post(TYPED, binary))
        assert found == expected
        assert found.tensors[f"{datatype}_OUT"][2] != np.array([1, 0, 0.5, 2], DTYPE_BY_DATATYPE[datatype]).tobytes()
        assert found.tensors["BYTES_OUT"][2] == raw_texts(b'NaN, [NaN] " NaN')


VALID: list[dict[str, Any]] = [
    {},
    {"id": ""},
    {"outputs": []},
    {"outputs": [{"name": "Y"}]},
    {"unknown": {"key": [1]}},
    {"parameters": {"binary_data_output": True}},
    {"outputs": [{"name": "Y"}], "parameters": {"binary_data_output": True}},
    {"parameters": {"a": 1, "b": "x", "c": True, "d": 1.5}},
    {"parameters": {"priority": 1, "timeout": 1000, "sequence_id": 3, "sequence_start": True}},
    {"inputs": [input_x(shape=[2, 3], data=[1, 2, 3, 4, 5, 6])]},
    {"inputs": [input_x(data=[[1, 2, 3]])]},
    {"inputs": [input_x(data=[[1], [2], [3]])]},
    {"inputs": [input_x(parameters={"other": 1})]},
    *({"outputs": [{"name": "Y", "parameters": {"classification": count}}]} for count in (0, 2, 9)),
    {"outputs": [{"name": "Y", "parameters": {"classification": 2, "binary_data": True}}]},
    {"outputs": [{"name": "Y", "parameters": {"binary_data": False}}], "parameters": {"binary_data_output": True}},
]


class TestRequests:
    @pytest.mark.parametrize("version", ["", "/versions/1"])
    def test_a_valid_request_has_the_answer_of_triton(self, both: Both, version: str) -> None:
        for changed in VALID:
            path = f"/v2/models/batched_echo{version}/infer"
            same_answer(both, path, json.dumps({"inputs": [input_x()], **changed}).encode())

    def test_a_raw_body_is_the_only_input(self, both: Both) -> None:
        """Also the only text, with or without its length."""
        answer = same_answer(both, BATCHED, RAW, Inference_Header_Content_Length="0")
        assert answer.tensors["Y"] == ("FP32", [1, 3], RAW)
        for body in (b"\x89PNG" * 2000, raw_texts(b"a body with its length"), b"x"):
            answer = same_answer(both, "/v2/models/scripted_large/infer", body, Inference_Header_Content_Length="0")
            assert np.frombuffer(answer.tensors["SUM"][2], np.int64).tolist() == [sum(body)]
        answer = same_answer(
            both, "/v2/models/scripted_rows/infer", b'{"text": "a"}', Inference_Header_Content_Length="0"
        )
        assert answer.tensors["TEXT"][2] == raw_texts(b"a")
        texts = raw_texts(b"a", b"b")
        for refusal in both.post("/v2/models/litellm_embed/infer", texts, Inference_Header_Content_Length="0"):
            text = "For BYTE datatype raw input 'input_text', the model must have input shape [1]"
            assert (refusal.status_code, text in refusal.text) == (400, True), refusal.text

    @pytest.mark.parametrize("names", [("NUMBERS",), ("TEXT",), ("TEXT", "NUMBERS")], ids=str)
    def test_the_answer_has_only_the_requested_outputs(self, both: Both, names: tuple[str, ...]) -> None:
        """Triton 2.51 fails for some outputs of an ensemble, so only the gateway gets that request."""
        for is_binary in (False, True):
            script = {"name": "SCRIPT", "datatype": "BYTES", "shape": [1], "data": ["{}"]}
            outputs = [{"name": name, "parameters": {"binary_data": is_binary}} for name in names]
            body = json.dumps({"inputs": [script], "outputs": outputs}).encode()
            expected = same_answer(both, "/v2/models/scripted/infer", body).tensors
            assert sorted(expected) == sorted(names)
            assert answer_of(both.gateway.post("/v2/models/scripted_chain/infer", content=body)).tensors == expected

    def test_an_output_that_differs_from_its_declaration_is_that_of_triton(self, both: Both) -> None:
        answer = same_answer(both, "/v2/models/scripted/infer", script(numbers=[1, 2], shape=[1, 2]))
        assert answer.tensors["NUMBERS"] == ("FP32", [1, 2], [1, 2])


def refused(
    both: Both, path: str, body: bytes, *, worded: bool = False, names: Sequence[str] = (), **headers: str
) -> tuple[int, int]:
    """Returns both statuses.

    ``worded``: one error begins with the other, without Triton's id of the request. ``names``: the error has one.
    """
    theirs, ours = both.post(path, body, **headers)
    assert list(ours.json()) == ["error"]
    assert ours.headers["content-type"] == "application/json"
    assert len(ours.content) <= 4096
    if worded:
        text, own = theirs.json()["error"].removeprefix("[request id: <id_unknown>] "), ours.json()["error"]
        assert text.startswith(own) or own.startswith(text), (text, own)
        assert not names or any(name in own for name in names), own
    return theirs.status_code, ours.status_code


INVALID: dict[str, dict[str, Any]] = {
    "no inputs": {"inputs": []},
    "wrong name": {"inputs": [input_x(name="Z")]},
    "additional input": {"inputs": [input_x(), input_x(name="Z")]},
    "duplicate input": {"inputs": [input_x(), input_x()]},
    "wrong datatype": {"inputs": [input_x(datatype="INT32")]},
    "unknown datatype": {"inputs": [input_x(datatype="X")]},
    "no data": {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 3]}]},
    "wrong rank": {"inputs": [input_x(shape=[3])]},
    "wrong dimension": {"inputs": [input_x(shape=[1, 4], data=[1, 2, 3, 4])]},
    "empty batch": {"inputs": [input_x(shape=[0, 3], data=[])]},
    "large batch": {"inputs": [input_x(shape=[5, 3], data=[1] * 15)]},
    "unknown output": {"inputs": [input_x()], "outputs": [{"name": "Z"}]},
    "reserved parameter": {"inputs": [input_x()], "parameters": {"triton_x": 1}},
    "object as parameter": {"inputs": [input_x()], "parameters": {"a": {}}},
    "null as parameter": {"inputs": [input_x()], "parameters": {"a": None}},
    "JSON data and binary size": {"inputs": [input_x(parameters={"binary_data_size": 12})]},
    "shared memory for an input": {
        "inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 3], "parameters": {"shared_memory_region": "a"}}]
    },
    "shared memory for an output": {
        "inputs": [input_x()],
        "outputs": [{"name": "Y", "parameters": {"shared_memory_region": "a", "shared_memory_byte_size": 12}}],
    },
}
MALFORMED: dict[str, bytes] = {
    "white space": b" ",
    "not JSON": b"nope",
    "truncated": b'{"inputs":[',
    "a list": b"[]",
    "no member inputs": b"{}",
    "null as inputs": b'{"inputs":null}',
    "beyond a double": b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1,3],"data":[1e400,2,3]}]}',
    **{
        name: json.dumps({"inputs": [input_x(**changed)]}).encode()
        for name, changed in {
            "too few elements": {"data": [1, 2]},
            "too many elements": {"data": [1, 2, 3, 4]},
            "strings as numbers": {"data": ["1", "2", "3"]},
            "booleans as numbers": {"data": [True, 2, 3]},
            "null as number": {"data": [None, 2, 3]},
            "data is not a list": {"data": 1},
            "number as name": {"name": 1},
        }.items()
    },
    "number as id": json.dumps({"id": 5, "inputs": [input_x()]}).encode(),
    "negative classification": json.dumps(
        {"inputs": [input_x()], "outputs": [{"name": "Y", "parameters": {"classification": -1}}]}
    ).encode(),
    "number as binary output": json.dumps({"inputs": [input_x()], "parameters": {"binary_data_output": 1}}).encode(),
}
UNWORDED = {"additional input", "empty batch", "object as parameter", "null as parameter"}
"""The cases of INVALID for which Triton has no words about the model, the tensor or the parameter."""
OF_X = {"name": "X", "datatype": "FP32", "shape": [1, 3]}
SIZED = {"inputs": [OF_X | binary_size(12)]}
STRINGS = {True: [raw_texts(b"a"), raw_texts(b"a", b"b", b"c")]}
STRINGS |= {False: [struct.pack("<I", 100) + b"a", b"ab", raw_texts(b"a", b"b") + b"c"]}
BINARY: list[tuple[str, dict[str, Any], bytes, bool]] = [
    *((BATCHED, {"inputs": [OF_X | binary_size(size)]}, b"\0" * size, True) for size in (0, 8, 16)),
    *((BATCHED, {"inputs": [OF_X | binary_size(size)]}, b"\0" * min(size, 16), False) for size in (13, 2**40)),
    *((BATCHED, SIZED, raw, bool(raw)) for raw in (RAW[:8], RAW + b"1234", b"")),
    *(
        (TYPED, {"inputs": [tensor_of("BYTES", **binary_size(len(raw)))]}, raw, worded)
        for worded, raws in STRINGS.items()
        for raw in raws
    ),
]
"""Path, request, bytes after the JSON, and whether both have the same words."""
ELEMENTS = {
    200: [("UINT8", 256), ("INT8", 128), ("INT32", 2**31), ("FP32", 1e39)],
    500: [
        *(("UINT8", -1), ("UINT8", 1.5), ("INT64", 2**63), ("UINT64", 2**64), ("BOOL", 1), ("BOOL", "true")),
        *(("BYTES", 1), ("BYTES", None), ("INT32", True)),
    ],
}
"""Status of Triton, which wraps numbers out of range -> datatype and element."""
UNKNOWN = {
    "/v2/models/nope/infer": "'nope' is not found",
    "/v2/models/batched_echo/versions/9/infer": "'batched_echo' version 9 is not found",
    "/v2/models/batched_echo/versions/x/infer": "",
    "/v2/models/batched_echo/infer/": "",
}
"""Path -> what both say, or an empty text if they say different things."""


class TestRefusals:
    @pytest.mark.parametrize("case", [*INVALID, *MALFORMED])
    def test_wrong_requests_are_400(self, both: Both, case: str) -> None:
        """Those of MALFORMED are 500 in Triton."""
        body = MALFORMED.get(case) or json.dumps({"inputs": [input_x()], **INVALID[case]}).encode()
        names = ("'batched_echo'", "'X'", "input X", "'Z'", "'triton_x'", "'a'")
        worded = case in INVALID and case not in UNWORDED
        theirs = 500 if case in MALFORMED else 404 if "shared memory" in case else 400
        assert refused(both, BATCHED, body, worded=worded, names=names) == (theirs, 400)

    @pytest.mark.parametrize("status", ELEMENTS)
    def test_wrong_elements_are_400(self, both: Both, status: int) -> None:
        for datatype, element in ELEMENTS[status]:
            tensor = {"name": datatype, "datatype": datatype, "shape": [1, 1], "data": [element]}
            assert refused(both, TYPED, json.dumps({"inputs": [tensor]}).encode()) == (status, 400), (datatype, element)

    @pytest.mark.parametrize(("path", "request_", "raw", "worded"), BINARY)
    def test_wrong_sizes_of_binary_tensors_are_400(
        self, both: Both, path: str, request_: dict[str, Any], raw: bytes, worded: bool
    ) -> None:
        body, headers = with_binary(request_, raw)
        assert refused(both, path, body, worded=worded, **headers) == (400, 400)

    @pytest.mark.parametrize("path", UNKNOWN)
    def test_unknown_models_and_versions_are_404(self, both: Both, path: str) -> None:
        body = json.dumps({"inputs": [input_x()]}).encode()
        assert refused(both, path, body, worded=bool(UNKNOWN[path]), names=[UNKNOWN[path]]) == (404, 404)

    def test_a_parameter_of_triton_and_a_raw_body_for_several_inputs_are_400(self, both: Both) -> None:
        wrong = ({"priority": "x"}, {"priority": 1.5}, {"timeout": "x"}, {"sequence_start": 1}, {"sequence_end": "x"})
        for parameters in wrong:
            body = json.dumps({"inputs": [input_x()], "parameters": parameters}).encode()
            assert refused(both, BATCHED, body, worded=True)[1] == 400, parameters
        assert refused(both, TYPED, b"1234", worded=True, Inference_Header_Content_Length="0") == (400, 400)

    def test_classes_of_texts_are_400(self, both: Both) -> None:
        """Triton 2.51 crashes on classes of texts and of an empty output, so only the gateway gets the requests."""
        texts = {"inputs": [tensor_of("BYTES", data=["a", "b"])], "outputs": classes_of("BYTES_OUT", 2)}
        empty = json.loads(script(numbers=[])) | {"outputs": classes_of("NUMBERS", 1)}
        for path, body, output in (
            (TYPED, texts, "'BYTES_OUT' of datatype BYTES."),
            ("/v2/models/scripted/infer", empty, "'NUMBERS', which may have no element."),
        ):
            answer = both.gateway.post(path, json=body)
            error = f"class result not available for output {output}"
            assert (answer.status_code, answer.json()) == (400, {"error": error})

    @pytest.mark.parametrize("model", ["scripted", "scripted_chain"])
    def test_an_error_of_a_model_has_the_status_of_triton(self, both: Both, model: str) -> None:
        statuses = {"UNKNOWN": 400, "INTERNAL": 500, "NOT_FOUND": 404, "INVALID_ARG": 400, "UNAVAILABLE": 503}
        for code, status in (statuses | {"UNSUPPORTED": 501, "ALREADY_EXISTS": 400, "CANCELLED": 400}).items():
            body = script(error={"code": code, "message": "EARLY_EXIT[nothing]"})
            assert refused(both, f"/v2/models/{model}/infer", body) == (status, status), code

    def test_a_model_that_raises_is_500_without_its_text(self, both: Both) -> None:
        theirs, ours = both.post("/v2/models/scripted/infer", script(**{"raise": "secret"}))
        assert (theirs.status_code, ours.status_code) == (500, 500)
        assert b"model.py" in theirs.content
        assert ours.json() == {"error": "Model 'scripted' failed: a model's script raised an exception."}


def test_the_setting_oip_shows_messages_of_models_under_v2_only(
    triton: EmbeddedTriton, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(expose_model_errors="oip")
    failing = {"error": {"code": "INTERNAL", "message": "no colour channel"}}
    with both_at(triton.http_url, gateway.url) as both:
        theirs, ours = both.post("/v2/models/scripted/infer", script(**failing))
        assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())
        body = {"SCRIPT": json.dumps(failing)}
        for verb in ("generate", "generate_stream"):
            assert "no colour channel" in both.gateway.post(f"/v2/models/scripted/{verb}", json=body).text
        assert "no colour channel" not in both.gateway.post("/v1/pipelines/scripted", json=body).text


def classes_of(output: str, count: int) -> list[Any]:
    return [{"name": output, "parameters": {"classification": count}}]


def script(**fields: Any) -> bytes:
    tensor = {"name": "SCRIPT", "datatype": "BYTES", "shape": [1], "data": [json.dumps(fields)]}
    return json.dumps({"inputs": [tensor]}).encode()


def test_a_decoupled_model_answers_with_one_response(both: Both, tmp_path: Path) -> None:
    """The status of Triton is 501 for every inference of a decoupled model over HTTP."""
    path = "/v2/models/scripted_stream/infer"
    theirs, ours = both.post(path, script(outputs=1, texts=["c3a4"]))
    assert (theirs.status_code, ours.status_code) == (501, 200)
    assert answer_of(ours).tensors["TEXT"] == ("BYTES", [1], ["ä"])
    notice = tmp_path / "cancelled"
    answer = both.gateway.post(path, content=script(outputs=50, interval_s=0.1, notice=str(notice)))
    assert answer.status_code == 400
    assert "generate_stream" in answer.json()["error"]
    eventually(notice.exists)
    assert both.gateway.post(path, content=script(outputs=0)).status_code == 400


DTYPES = {name: dtype for name, dtype in DTYPE_BY_DATATYPE.items() if name != "BF16"}
"""The client does not support BF16 arrays of numpy."""


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
async def test_every_datatype(gateway: GatewayProcess, compression: str | None) -> None:
    ways = {"request_compression_algorithm": compression, "response_compression_algorithm": compression}
    async with aio.InferenceServerClient(urlsplit(gateway.url).netloc) as connected:
        for datatype, binary_in, binary_out in product(DTYPES, (True, False), (True, False)):
            if datatype == "FP16" and not (binary_in and binary_out):
                continue  # the client rejects FP16 in JSON
            sent = np.array([[b"a", "zw\u00f6lf".encode()] if datatype == "BYTES" else [1, 0]], DTYPES[datatype])
            tensor = http.InferInput(datatype, list(sent.shape), datatype)
            tensor.set_data_from_numpy(sent, binary_data=binary_in)
            outputs = [http.InferRequestedOutput(f"{datatype}_OUT", binary_data=binary_out)]
            answer = await connected.infer("typed_echo", [tensor], outputs=outputs, request_id="7", **ways)
            found = answer.as_numpy(f"{datatype}_OUT")
            if datatype == "BYTES":  # a text in JSON comes back as a text, one in bytes as bytes
                texts = [each.encode() if isinstance(each, str) else each for each in found.flat]
                found = np.array([texts], np.object_)
            assert (found.dtype, found.tolist()) == (sent.dtype, sent.tolist())
            assert answer.get_response()["id"] == "7"
        assert await connected.is_model_ready("typed_echo", "1")


def test_classes_parameters_and_metadata_calls_of_the_client(gateway: GatewayProcess, triton: EmbeddedTriton) -> None:
    tensor = http.InferInput("X", [1, 3], "FP32")
    tensor.set_data_from_numpy(np.array([[1, 3, 2]], np.float32))
    outputs = [http.InferRequestedOutput("Y", class_count=2)]
    options = {
        "outputs": outputs,
        "priority": 1,
        "timeout": 100_000,
        "sequence_id": 5,
        "sequence_start": True,
        "parameters": {"own": "x"},
    }
    urls = [urlsplit(url).netloc for url in (gateway.url, triton.http_url)]
    with http.InferenceServerClient(urls[0]) as ours, http.InferenceServerClient(urls[1]) as theirs:
        for each in (ours, theirs):
            answer = each.infer("batched_echo", [tensor], **options)
            assert answer.as_numpy("Y").tolist() == [[b"3.000000:1:dog", b"2.000000:2:fox"]]
        assert ours.is_server_live()
        assert ours.is_server_ready()
        assert ours.is_model_ready("typed_echo")
        assert not ours.is_model_ready("nope")
        assert ours.get_server_metadata()["name"] == "triton-gateway"
        for model in ("typed_echo", "scripted_chain"):
            assert ours.get_model_metadata(model) == theirs.get_model_metadata(model)
            assert ours.get_model_config(model, "1")["input"] == theirs.get_model_config(model, "1")["input"]
        assert ours.get_inference_statistics("scripted_tail") == theirs.get_inference_statistics("scripted_tail")
        assert {"name": "typed_echo", "version": "1", "state": "READY"} in ours.get_model_repository_index()
