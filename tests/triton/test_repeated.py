"""A response that is compared with an earlier one of its model is decoded as every other one."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from app.core.errors import UpstreamProtocol
from app.core.inference import InferenceResponse
from app.triton.codec import LEARNS_AFTER, RepeatedHeads, response_of, streamed_response_of

WORD, NUMBER = b"\x05\0\0\0word ", b"\x07\0\0\0"


def message(*raw: bytes, request_id: str = "a" * 32) -> pb.ModelInferResponse:
    made = pb.ModelInferResponse(model_name="m", model_version="1", id=request_id, raw_output_contents=raw)
    made.parameters["triton_final_response"].bool_param = False
    made.outputs.add(name="TEXT", datatype="BYTES", shape=[1])
    made.outputs.add(name="TOKEN_ID", datatype="INT32", shape=[1])
    return made


def same(left: InferenceResponse, right: InferenceResponse) -> bool:
    return (left.is_final, left.version) == (right.is_final, right.version) and {
        name: (tensor.datatype, tensor.array.dtype, tensor.shape, tensor.array.tolist())
        for name, tensor in left.outputs.items()
    } == {
        name: (tensor.datatype, tensor.array.dtype, tensor.shape, tensor.array.tolist())
        for name, tensor in right.outputs.items()
    }


def check(heads: RepeatedHeads, sent: pb.ModelInferResponse) -> None:
    """Decodes a response of a stream with ``heads`` and without; both ways have the same result or the same error."""
    received = pb.ModelInferResponse.FromString(sent.SerializeToString())
    expected, found = (
        decoded(lambda: streamed_response_of(sent)),
        decoded(lambda: heads.response_of("m", received, streamed=True)),
    )
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
    else:
        assert same(found, expected)


def decoded(decode: Callable[[], InferenceResponse]) -> InferenceResponse | str:
    try:
        return decode()
    except UpstreamProtocol as exc:
        return str(exc)


def with_final_flag(changed: pb.ModelInferResponse) -> None:
    changed.parameters["triton_final_response"].bool_param = True


def with_another_shape(changed: pb.ModelInferResponse) -> None:
    changed.outputs[1].shape[:] = [1, 1]


def with_another_datatype(changed: pb.ModelInferResponse) -> None:
    changed.outputs[1].datatype = "FP32"


def with_another_version(changed: pb.ModelInferResponse) -> None:
    changed.model_version = "2"


def with_a_further_tensor(changed: pb.ModelInferResponse) -> None:
    changed.raw_output_contents.append(b"")


def without_a_tensor(changed: pb.ModelInferResponse) -> None:
    del changed.raw_output_contents[-1]


def with_too_few_bytes(changed: pb.ModelInferResponse) -> None:
    changed.raw_output_contents[1] = b"\0\0\0"


def with_a_wrong_length(changed: pb.ModelInferResponse) -> None:
    changed.raw_output_contents[0] = b"\x06\0\0\0word "


def with_a_longer_id(changed: pb.ModelInferResponse) -> None:
    changed.id += "a"


@pytest.mark.parametrize(
    "change",
    [
        with_final_flag,
        with_another_shape,
        with_another_datatype,
        with_another_version,
        with_a_further_tensor,
        without_a_tensor,
        with_too_few_bytes,
        with_a_wrong_length,
        with_a_longer_id,
    ],
)
@pytest.mark.parametrize("earlier", [1, LEARNS_AFTER + 2])
def test_a_different_response_is_decoded_by_itself(
    change: Callable[[pb.ModelInferResponse], None], earlier: int
) -> None:
    heads, changed = RepeatedHeads(), message(WORD, NUMBER)
    change(changed)
    check(heads, message(WORD, NUMBER))
    for _ in range(earlier):
        check(heads, changed)
    check(heads, message(b"\x02\0\0\0hi", b"\x08\0\0\0", request_id="b" * 32))


def test_models_and_kinds_of_calls_do_not_mix() -> None:
    heads, sent = RepeatedHeads(), message(WORD, NUMBER)
    assert not heads.response_of("m", message(WORD, NUMBER), streamed=True).is_final
    assert heads.response_of("m", message(WORD, NUMBER)).is_final
    sent.outputs[0].name = "OTHER"
    assert list(heads.response_of("n", sent).outputs) == ["OTHER", "TOKEN_ID"]
    assert same(heads.response_of("m", message(WORD, NUMBER)), response_of(message(WORD, NUMBER)))


@st.composite
def messages(draw: st.DrawFn) -> pb.ModelInferResponse:
    """Messages that are nearly the same, with tensors that are nearly valid."""
    made = pb.ModelInferResponse(model_name="m", id=draw(st.sampled_from(["a", "ab", "b\x1a\x01a"])))
    for name in draw(st.lists(st.sampled_from(["X", "Y"]), max_size=2)):
        made.outputs.add(name=name, datatype=draw(st.sampled_from(["INT32", "BYTES"])), shape=[draw(st.integers(0, 2))])
        elements = [draw(st.sampled_from([b"\0\0\0\0", b"\x01\0\0\0x"]))] * made.outputs[-1].shape[0]
        made.raw_output_contents.append(b"".join(elements))
    return made


@given(st.lists(messages(), min_size=2, max_size=LEARNS_AFTER + 4))
def test_every_response_is_decoded_as_without_earlier_ones(received: list[pb.ModelInferResponse]) -> None:
    heads = RepeatedHeads()
    for each in received:
        check(heads, each)


def test_an_array_of_a_known_head_has_aligned_bytes() -> None:
    heads = RepeatedHeads()
    check(heads, message(WORD, NUMBER))
    found = heads.response_of("m", message(b"\x01\0\0\0x", NUMBER)).outputs["TOKEN_ID"].array
    assert found.flags.aligned
    assert np.array_equal(found, [7])
