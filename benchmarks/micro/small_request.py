"""The parts of a unary request of four floats, from the bytes of its body to the bytes of its answer."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
import orjson
from tritonclient.grpc import service_pb2

from app.core.answer import Ending
from app.core.inference import Deadline, InferenceRequest, InferenceResponse, Tensor
from app.core.model import ModelConfig, TensorSpec
from app.grpc.rpc import Metadata
from app.observability.metrics import CountedCall, Metrics
from app.pipelines.pipeline import CompileContext, Pipeline
from app.pipelines.run import Collector, run
from app.pipelines.spec import PipelineSpec
from app.triton.codec import RepeatedHeads, request_message
from app.triton.triton_engine import TritonEngine

BODY = b'{"INPUT": [1.5, 2.5, 3.5, 4.5]}'
VALUES = np.array([1.5, 2.5, 3.5, 4.5], np.float32)

Part = Callable[[int], None]


class _Answered:
    """A call that Triton has answered."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        pass

    async def response(self) -> bytes:
        return self._answer


class _AnsweringTransport:
    def __init__(self, answer: bytes) -> None:
        self._call = _Answered(answer)

    async def unary(self, path: str, message: bytes, timeout_s: float, metadata: Metadata = ()) -> _Answered:
        return self._call


class _AnsweringEngine:
    def __init__(self, response: InferenceResponse) -> None:
        self._response = response

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        return self._response


def identity_pipeline() -> Pipeline:
    config = ModelConfig(
        "identity",
        "python",
        0,
        (TensorSpec("INPUT", "FP32", (4,)),),
        (TensorSpec("OUTPUT", "FP32", (4,)),),
    )
    return Pipeline("identity", PipelineSpec(model="identity"), config, {"identity": config}, CompileContext())


def parts() -> dict[str, Part]:
    pipeline = identity_pipeline()
    request = pipeline.request_of_json(BODY)
    response = InferenceResponse({"OUTPUT": Tensor("OUTPUT", "FP32", VALUES)})
    message = service_pb2.ModelInferResponse(model_name="identity", model_version="1", id=request.request_id)
    message.outputs.add(name="OUTPUT", datatype="FP32", shape=[4])
    message.raw_output_contents.append(VALUES.tobytes())
    answer = message.SerializeToString()
    quick: Any = _AnsweringEngine(response)
    transport: Any = _AnsweringTransport(answer)
    engine = TritonEngine(transport, [partial(CountedCall, metrics=Metrics("0"))])
    deadline = Deadline.after(1e6)
    from_bytes = service_pb2.ModelInferResponse.FromString
    heads = RepeatedHeads()

    def run_small() -> Coroutine[Any, Any, Ending]:
        return run(Collector(pipeline, request, is_whole=True), quick.infer(request, deadline))

    values = _result_of(run_small()).outputs[0]
    return {
        "request_of_json": _repeated(lambda: pipeline.request_of_json(BODY)),
        "run, with an engine that answers at once": _awaited(run_small),
        "engine.infer, with a transport that answers at once": _awaited(lambda: engine.infer(request, deadline)),
        "of that: the request message, serialized": _repeated(lambda: request_message(request)),
        "of that: the response of the answer's bytes": _repeated(
            lambda: heads.response_of("identity", from_bytes(answer))
        ),
        "the same by protobuf, without a known head": _repeated(
            lambda: RepeatedHeads().response_of("identity", from_bytes(answer))
        ),
        "the answer's JSON": _repeated(lambda: orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)),
    }


def _result_of(work: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine waits")


def _repeated(call: Callable[[], object]) -> Part:
    def part(count: int) -> None:
        for _ in range(count):
            call()

    return part


def _awaited(call: Callable[[], Coroutine[Any, Any, Any]]) -> Part:
    return _repeated(lambda: _result_of(call()))
