"""A response with a known head is decoded to the same tensors as by protobuf, or not at all."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from app.core.errors import UpstreamProtocol
from app.core.inference import InferenceResponse
from app.triton.codec import response_of, streamed_response_of
from app.triton.repeated import LEARNS_AFTER, MAX_LEARNED_BYTES, RepeatedHeads

WORD, NUMBER = b"\x05\0\0\0word ", b"\x07\0\0\0"
OTHER_ID = "b" * 32


def message(*raw: bytes, request_id: str = "a" * 32) -> pb.ModelInferResponse:
    made = pb.ModelInferResponse(model_name="m", model_version="1", id=request_id, raw_output_contents=raw)
    made.parameters["triton_final_response"].bool_param = False
    made.outputs.add(name="TEXT", datatype="BYTES", shape=[1])
    made.outputs.add(name="TOKEN_ID", datatype="INT32", shape=[1])
    return made


def heads_after(*messages: pb.ModelInferResponse) -> RepeatedHeads:
    """The heads after these responses of a stream."""
    heads = RepeatedHeads()
    for each in messages:
        heads.learn("m", each.SerializeToString(), each, streamed_response_of(each))
    return heads


def same(left: InferenceResponse, right: InferenceResponse) -> bool:
    return (left.is_final, left.version) == (right.is_final, right.version) and {
        name: (tensor.datatype, tensor.array.dtype, tensor.shape, tensor.array.tolist())
        for name, tensor in left.outputs.items()
    } == {
        name: (tensor.datatype, tensor.array.dtype, tensor.shape, tensor.array.tolist())
        for name, tensor in right.outputs.items()
    }


def test_other_bytes_and_another_id_have_the_known_head() -> None:
    heads = heads_after(message(WORD, NUMBER))
    second = message(b"\x02\0\0\0hi", b"\x08\0\0\0", request_id=OTHER_ID)
    found = heads.response_of("m", second.SerializeToString())
    assert found is not None
    assert same(found, streamed_response_of(second))


@pytest.mark.parametrize("size", [0, 1, 90, 200, 20_000, 3_000_000])
def test_a_streamed_response_of_any_size_has_the_known_head(size: int) -> None:
    heads = heads_after(message(WORD, NUMBER))
    second = message(size.to_bytes(4, "little") + b"x" * size, NUMBER)
    found = heads.streamed_response_of("m", pb.ModelStreamInferResponse(infer_response=second).SerializeToString())
    assert found is not None
    assert same(found, streamed_response_of(second))


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
def test_a_different_response_is_left_to_protobuf(change: Callable[[pb.ModelInferResponse], None]) -> None:
    heads, changed = heads_after(message(WORD, NUMBER)), message(WORD, NUMBER)
    change(changed)
    streamed = pb.ModelStreamInferResponse(infer_response=changed)
    assert heads.response_of("m", changed.SerializeToString()) is None
    assert heads.streamed_response_of("m", streamed.SerializeToString()) is None


def test_an_error_of_a_stream_is_left_to_protobuf() -> None:
    heads = heads_after(message(WORD, NUMBER))
    failed = pb.ModelStreamInferResponse(infer_response=message(WORD, NUMBER), error_message="no")
    assert heads.streamed_response_of("m", failed.SerializeToString()) is None
    assert heads.streamed_response_of("m", b"") is None


def test_a_cut_response_is_left_to_protobuf() -> None:
    heads, whole = heads_after(message(WORD, NUMBER)), message(WORD, NUMBER)
    plain = whole.SerializeToString()
    streamed = pb.ModelStreamInferResponse(infer_response=whole).SerializeToString()
    assert not any(heads.response_of("m", plain[:end]) for end in range(len(plain)))
    assert not any(heads.streamed_response_of("m", streamed[:end]) for end in range(len(streamed)))


def test_another_model_has_its_own_head() -> None:
    heads = heads_after(message(WORD, NUMBER))
    assert heads.response_of("n", message(WORD, NUMBER).SerializeToString()) is None


def test_a_new_head_is_learned_after_several_responses() -> None:
    changed = message(WORD, NUMBER)
    changed.model_version = "2"
    answer = changed.SerializeToString()
    assert heads_after(message(WORD, NUMBER), *[changed] * LEARNS_AFTER).response_of("m", answer) is None
    assert heads_after(message(WORD, NUMBER), *[changed] * (LEARNS_AFTER + 1)).response_of("m", answer) is not None


def test_a_large_response_is_not_learned() -> None:
    size = MAX_LEARNED_BYTES
    large = message(size.to_bytes(4, "little") + b"x" * size, NUMBER)
    assert heads_after(large).response_of("m", message(WORD, NUMBER).SerializeToString()) is None


def test_a_response_without_an_id_is_not_learned() -> None:
    nameless = message(WORD, NUMBER, request_id="")
    assert heads_after(nameless).response_of("m", nameless.SerializeToString()) is None


def test_a_head_is_learned_only_if_the_tensors_are_at_the_end() -> None:
    """A server may write the fields of a message in any order."""
    usual = message(WORD, NUMBER)
    tensors = pb.ModelInferResponse(raw_output_contents=usual.raw_output_contents).SerializeToString()
    reordered = tensors + usual.SerializeToString().removesuffix(tensors)
    assert pb.ModelInferResponse.FromString(reordered) == usual
    heads = RepeatedHeads()
    heads.learn("m", reordered, usual, response_of(usual))
    assert heads.response_of("m", reordered) is None


@st.composite
def messages(draw: st.DrawFn) -> pb.ModelInferResponse:
    """Messages that are nearly the same, with tensors that are nearly valid."""
    made = pb.ModelInferResponse(model_name="m", id=draw(st.sampled_from(["a", "ab", "b\x1a\x01a"])))
    for name in draw(st.lists(st.sampled_from(["X", "Y"]), max_size=2)):
        made.outputs.add(name=name, datatype=draw(st.sampled_from(["INT32", "BYTES"])), shape=[draw(st.integers(0, 2))])
        elements = [draw(st.sampled_from([b"\0\0\0\0", b"\x01\0\0\0x"]))] * made.outputs[-1].shape[0]
        made.raw_output_contents.append(b"".join(elements))
    return made


@given(messages(), messages())
def test_the_second_response_is_decoded_as_by_protobuf(
    first: pb.ModelInferResponse, second: pb.ModelInferResponse
) -> None:
    heads = RepeatedHeads()
    try:
        heads.learn("m", first.SerializeToString(), first, streamed_response_of(first))
    except UpstreamProtocol:
        return
    found = heads.response_of("m", second.SerializeToString())
    if found is not None:
        assert same(found, streamed_response_of(second))
    elif first.outputs == second.outputs and len(first.id) == len(second.id) and first.outputs:
        with pytest.raises(UpstreamProtocol):
            streamed_response_of(second)


@given(st.binary(max_size=200), st.integers(0, 120))
def test_arbitrary_bytes_are_decoded_as_by_protobuf(tail: bytes, kept: int) -> None:
    whole = message(WORD, NUMBER)
    heads, answer = heads_after(whole), whole.SerializeToString()[:kept] + tail
    found = heads.response_of("m", answer)
    if found is not None:
        assert same(found, streamed_response_of(pb.ModelInferResponse.FromString(answer)))


def test_an_array_of_a_known_head_has_aligned_bytes() -> None:
    heads = heads_after(message(WORD, NUMBER))
    found = heads.response_of("m", message(b"\x01\0\0\0x", NUMBER).SerializeToString())
    assert found is not None
    assert found.outputs["TOKEN_ID"].array.flags.aligned
    assert np.array_equal(found.outputs["TOKEN_ID"].array, [7])
