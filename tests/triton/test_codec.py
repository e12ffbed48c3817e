"""Round trips through messages of Triton, and errors for bytes that do not match their shape."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from app.core.errors import UpstreamProtocol
from app.core.inference import (
    BYTES,
    DTYPE_BY_DATATYPE,
    InferenceRequest,
    InferenceResponse,
    RequestedOutput,
    Tensor,
    bytes_array,
)
from app.triton.codec import RepeatedHeads, request_message

NUMERIC = sorted(set(DTYPE_BY_DATATYPE) - {BYTES})


def message_of(request: InferenceRequest, *, streamed: bool = False) -> service_pb2.ModelInferRequest:
    """Returns the request that Triton reads."""
    return service_pb2.ModelInferRequest.FromString(request_message(request, streamed=streamed))


def echoed(*tensors: Tensor) -> service_pb2.ModelInferResponse:
    """Returns a response with the tensors of the request."""
    request = message_of(InferenceRequest("m", tensors))
    answer = service_pb2.ModelInferResponse(model_name="m", raw_output_contents=request.raw_input_contents)
    for each in request.inputs:
        answer.outputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
    return answer


def decoded(
    message: service_pb2.ModelInferResponse, heads: RepeatedHeads | None = None, *, streamed: bool = False
) -> InferenceResponse:
    """Decodes a copy of the response, as the first one of its model without ``heads``."""
    received = service_pb2.ModelInferResponse.FromString(message.SerializeToString())
    return (heads or RepeatedHeads()).response_of("m", received, streamed=streamed)


def answer(datatype: str, shape: list[int], raw: bytes) -> service_pb2.ModelInferResponse:
    message = service_pb2.ModelInferResponse(raw_output_contents=[raw])
    message.outputs.add(name="Y", datatype=datatype, shape=shape)
    return message


@st.composite
def numeric_tensors(draw: st.DrawFn) -> Tensor:
    datatype = draw(st.sampled_from(NUMERIC))
    dtype = DTYPE_BY_DATATYPE[datatype]
    shape = draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    raw = bytes(byte & 1 for byte in raw) if datatype == "BOOL" else raw
    return Tensor("Y", datatype, np.frombuffer(raw, dtype).reshape(shape))


@given(numeric_tensors())
def test_numbers_survive_a_round_trip(tensor: Tensor) -> None:
    back = decoded(echoed(tensor)).outputs["Y"]
    assert back.datatype == tensor.datatype
    assert back.shape == tensor.shape
    assert back.array.dtype == tensor.array.dtype
    assert back.array.tobytes() == tensor.array.tobytes()


@given(st.lists(st.binary(max_size=40), max_size=6), st.sampled_from([(-1,), (1, -1), (-1, 1, 1)]))
def test_bytes_survive_a_round_trip(values: list[bytes], form: tuple[int, ...]) -> None:
    """They are encoded like in tritonclient."""
    array = bytes_array(values, tuple(len(values) if side == -1 else side for side in form))
    message = echoed(Tensor("Y", BYTES, array))
    if values:
        assert message.raw_output_contents[0] == serialize_byte_tensor(array).item()
    back = decoded(message).outputs["Y"]
    assert back.shape == array.shape
    assert list(back.array.flat) == values


@pytest.mark.parametrize("datatype", NUMERIC)
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_a_tensor_is_written_row_by_row(datatype: str, is_contiguous: bool) -> None:
    for rows in (150, 3):
        array = np.arange(rows * 120).reshape(rows, 120).astype(DTYPE_BY_DATATYPE[datatype])
        sent = array if is_contiguous else array.T
        back = decoded(echoed(Tensor("Y", datatype, sent))).outputs["Y"].array
        assert back.shape == sent.shape
        assert back.tobytes() == sent.tobytes()


@pytest.mark.parametrize("size", [0, 1, 123, 124, 127, 128, 16_379, 16_380, 16_383, 16_384, 2**21 - 5, 2**21])
def test_bytes_of_any_size_survive_a_round_trip(size: int) -> None:
    """The size is encoded with a variable length."""
    values = bytes_array([b"a" * size, b"b"], (2,))
    small = Tensor("Z", "INT32", np.array([7], np.int32))
    back = decoded(echoed(Tensor("Y", BYTES, values), small)).outputs
    assert back["Y"].array.tolist() == values.tolist()
    assert back["Z"].array.tolist() == [7]


def test_requests_of_one_signature_differ_in_values_and_id() -> None:
    first, second = (InferenceRequest("m", (Tensor("X", "INT32", np.array([n], np.int32)),), "3") for n in (1, 2))
    for request, raw in ((first, b"\1\0\0\0"), (second, b"\2\0\0\0")):
        message = message_of(request)
        assert (message.model_name, message.model_version, message.id) == ("m", "3", request.request_id)
        assert message.raw_input_contents[0] == raw
        assert [(each.name, each.datatype, each.shape) for each in message.inputs] == [("X", "INT32", [1])]


@pytest.mark.parametrize(
    ("datatype", "shape", "raw"),
    [
        ("FP32", [2], b"\0" * 7),
        ("FP32", [2], b"\0" * 9),
        ("FP32", [2], b""),
        ("FP32", [], b""),
        ("FP32", [0], b"\0" * 4),
        ("FP32", [-1], b"\0" * 4),
        ("FP32", [-1, -4], b"\0" * 16),
        ("FP32", [2**62, 4], b""),
        ("UINT8", [2**32, 2**32], b""),
        ("INT8", [2**63 - 1, 2**63 - 1, 2**63 - 1], b"\0"),
        ("BYTES", [1], b""),
        ("BYTES", [2], struct.pack("<I", 1) + b"a"),
        ("BYTES", [0], struct.pack("<I", 1) + b"a"),
        ("BYTES", [1], struct.pack("<I", 2) + b"a"),
        ("BYTES", [1], b"\1\0\0"),
        ("BYTES", [1], b"\xff\xff\xff\xff"),
        ("BYTES", [-1], struct.pack("<I", 1) + b"a"),
        ("BYTES", [2**62, 4], b""),
        ("FP32", [0, 2**40, 2**40], b""),
        ("FP32", [2**40, 0], b""),
        ("BYTES", [2**40, 0], b""),
        ("BYTES", [0, 2**40, 2**40], b""),
        ("FP32", [1] * 100, b"\0" * 4),
        ("BYTES", [1] * 100, b"\0" * 4),
    ],
)
def test_bytes_that_do_not_match_their_shape_are_rejected(datatype: str, shape: list[int], raw: bytes) -> None:
    with pytest.raises(UpstreamProtocol, match="do not fit its shape"):
        decoded(answer(datatype, shape, raw))


@pytest.mark.parametrize("datatype", ["", "FP8", "STRING", "fp32", "JSON"])
def test_an_unknown_datatype_is_rejected(datatype: str) -> None:
    with pytest.raises(UpstreamProtocol, match="datatype"):
        decoded(answer(datatype, [1], b"\0\0\0\0"))


def test_tensors_without_raw_contents_are_rejected() -> None:
    message = answer("FP32", [1], b"\0\0\0\0")
    del message.raw_output_contents[:]
    with pytest.raises(UpstreamProtocol, match="without their raw contents"):
        decoded(message)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (True, "bool_param"),
        (False, "bool_param"),
        (0, "int64_param"),
        (-(2**63), "int64_param"),
        (2**63 - 1, "int64_param"),
        (0.0, "double_param"),
        (1e308, "double_param"),
        ("", "string_param"),
        ("a\0ü", "string_param"),
    ],
)
def test_a_parameter_keeps_its_type(value: Any, field: str) -> None:
    message = message_of(InferenceRequest("m", (), parameters={"p": value}))
    assert message.parameters["p"].WhichOneof("parameter_choice") == field
    assert getattr(message.parameters["p"], field) == value


def test_only_a_stream_requests_a_final_flag() -> None:
    request = InferenceRequest("m", ())
    assert not message_of(request).parameters
    assert message_of(request, streamed=True).parameters["triton_enable_empty_final_response"].bool_param


@pytest.mark.parametrize("flag", [None, False, True])
def test_a_streamed_response_is_final_only_with_the_flag(flag: bool | None) -> None:
    message = echoed()
    message.model_version = "7"
    if flag is not None:
        message.parameters["triton_final_response"].bool_param = flag
    assert decoded(message, streamed=True).is_final is bool(flag)
    assert (decoded(message).is_final, decoded(message).version) == (True, "7")


dimensions = st.one_of(st.integers(0, 4), st.sampled_from([-1, -(2**63), 2**31, 2**40, 2**62, 2**63 - 1]))
datatypes = st.one_of(st.sampled_from([*sorted(DTYPE_BY_DATATYPE), "", "FP8"]), st.text(max_size=4))


@st.composite
def hostile_messages(draw: st.DrawFn) -> service_pb2.ModelInferResponse:
    message = service_pb2.ModelInferResponse(raw_output_contents=draw(st.lists(st.binary(max_size=24), max_size=3)))
    for _ in range(draw(st.integers(0, 3))):
        shape = draw(st.lists(dimensions, max_size=4))
        message.outputs.add(name=draw(st.text(max_size=4)), datatype=draw(datatypes), shape=shape)
    return message


@given(hostile_messages())
def test_a_hostile_response_is_read_or_rejected(message: service_pb2.ModelInferResponse) -> None:
    """The number of lists in the JSON of an output is limited by the size of the message."""
    try:
        response = decoded(message, streamed=True)
    except UpstreamProtocol:
        return
    for tensor in response.outputs.values():
        tensor.array.tolist()


def test_the_name_of_an_output_is_cut_in_the_error() -> None:
    message = answer("FP32", [1], b"")
    message.outputs[0].name = "Y" * 10_000
    with pytest.raises(UpstreamProtocol) as caught:
        decoded(message)
    assert len(caught.value.detail) < 500


def test_requested_outputs_are_sent_with_classification() -> None:
    outputs = (RequestedOutput("Y"), RequestedOutput("Z", 3))
    request = message_of(InferenceRequest("m", (), outputs=outputs))
    classes = [(each.name, each.parameters["classification"].int64_param) for each in request.outputs]
    assert classes == [("Y", 0), ("Z", 3)]
    assert not message_of(InferenceRequest("m", ())).outputs


def summary_of(message: service_pb2.ModelInferResponse, heads: RepeatedHeads | None = None) -> object:
    """What is decoded from the response of a stream, or the error."""
    try:
        response = decoded(message, heads, streamed=True)
    except UpstreamProtocol as exc:
        return str(exc)
    outputs = response.outputs.items()
    tensors = {name: (each.datatype, each.array.dtype, each.shape, each.array.tolist()) for name, each in outputs}
    return response.is_final, response.version, tensors


@st.composite
def similar_messages(draw: st.DrawFn) -> service_pb2.ModelInferResponse:
    """Messages that are nearly the same, with tensors that are nearly valid."""
    made = service_pb2.ModelInferResponse(model_name="m", id=draw(st.sampled_from(["a", "ab", "b\x1a\x01a"])))
    made.model_version = draw(st.sampled_from(["1", "2"]))
    made.parameters["triton_final_response"].bool_param = draw(st.booleans())
    for name in draw(st.lists(st.sampled_from(["X", "Y"]), max_size=2)):
        made.outputs.add(name=name, datatype=draw(st.sampled_from(["INT32", "BYTES"])), shape=[draw(st.integers(0, 2))])
        elements = [draw(st.sampled_from([b"\0\0\0\0", b"\x01\0\0\0x"]))] * made.outputs[-1].shape[0]
        made.raw_output_contents.append(b"".join(elements))
    return made


@given(st.lists(similar_messages(), min_size=2, max_size=20))
def test_every_response_is_decoded_as_without_earlier_ones(received: list[service_pb2.ModelInferResponse]) -> None:
    heads = RepeatedHeads()
    for each in received:
        assert summary_of(each, heads) == summary_of(each)


def test_the_heads_of_models_do_not_mix() -> None:
    heads, other = RepeatedHeads(), answer("INT32", [1], b"\7\0\0\0")
    other.outputs[0].name = "OTHER"
    assert list(heads.response_of("m", answer("FP32", [1], b"\0" * 4)).outputs) == ["Y"]
    assert list(heads.response_of("n", other).outputs) == ["OTHER"]
    array = decoded(answer("FP32", [1], b"\0\0\x80?"), heads).outputs["Y"].array
    assert (array.tolist(), array.flags.aligned) == ([1.0], True)
