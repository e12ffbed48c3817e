"""Random requests, and what Triton's own gRPC answers to them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor

from tests.live.side_by_side import raw_texts
from tests.zoo.kinds import DTYPES, Form, Kind

Array = NDArray[Any]
LONGEST_S = 60.0
LARGEST = 256 * 2**20


@dataclass(frozen=True)
class Tensor:
    datatype: str
    array: Array

    @property
    def raw(self) -> bytes:
        flat = np.ascontiguousarray(self.array)
        return raw_texts(*flat.reshape(-1).tolist()) if self.datatype == "BYTES" else flat.tobytes()

    @property
    def shape(self) -> list[int]:
        return list(self.array.shape)

    @classmethod
    def of_raw(cls, datatype: str, shape: Sequence[int], raw: bytes) -> "Tensor":
        array = deserialize_bytes_tensor(raw) if datatype == "BYTES" else np.frombuffer(raw, DTYPES[datatype])
        return cls(datatype, array.reshape(shape))

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Tensor)
        return (self.datatype, self.shape, self.raw) == (other.datatype, other.shape, other.raw)

    def __hash__(self) -> int:
        raise TypeError

    def __repr__(self) -> str:
        return f"{self.datatype}{self.shape} {str(self.array.reshape(-1)[:4])[:80]}"


Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One request to the model of a kind, with the batch dimension if the model has one."""

    kind: Kind
    inputs: Tensors
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Truth:
    """The responses of Triton; `error` is the text of the error that ended them."""

    responses: list[Tensors]
    error: str | None = None


def random_case(kind: Kind, random: Random, *, rows: int | None = None) -> Case:
    """``rows``: the size of the batch, if the model has batches; by default a random one."""
    batch = (rows or random.randint(1, kind.batch),) if kind.batch else ()
    inputs = {
        name: Tensor(form.datatype, _array_of(kind, name, form, random, batch))
        for name, form in kind.input_forms.items()
        if not form.is_optional or random.random() < 0.5
    }
    return Case(kind, inputs, {name: random.choice(values) for name, values in kind.parameters.items()})


def _array_of(kind: Kind, name: str, form: Form, random: Random, batch: tuple[int, ...]) -> Array:
    array = form.array(random, batch)
    if name in kind.fixed:
        array.reshape(-1)[:] = random.choices(kind.fixed[name], k=array.size)
    if kind.kind_of(name) == "image":
        array.reshape(-1)[:] = [b"\x89PNG\r\n\x1a\n" + content for content in array.reshape(-1)]
    return array


class DirectTriton:
    """Calls Triton with nothing but the generated gRPC stub."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.max_receive_message_length", LARGEST)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._channel.close()

    def answer(self, case: Case) -> Truth:
        responses: list[Tensors] = []
        try:
            responses.extend(tensors for tensors in self._responses(case) if tensors)
        except RuntimeError as exc:
            return Truth(responses, str(exc))
        except grpc.RpcError as exc:
            return Truth(responses, exc.details())
        return Truth(responses)

    def _responses(self, case: Case) -> Iterator[Tensors]:
        request = _message_of(case)
        if not case.kind.is_decoupled:
            yield _tensors_of(self._stub.ModelInfer(request, timeout=LONGEST_S))
            return
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        for message in self._stub.ModelStreamInfer(iter([request]), timeout=LONGEST_S):
            if message.error_message:
                raise RuntimeError(message.error_message)
            yield _tensors_of(message.infer_response)
            if message.infer_response.parameters["triton_final_response"].bool_param:
                return


def _message_of(case: Case) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=case.kind.name, id="direct")
    for name, tensor in case.inputs.items():
        request.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.raw)
    for name, value in case.parameters.items():
        request.parameters[name].int64_param = value
    return request


def _tensors_of(response: service_pb2.ModelInferResponse) -> Tensors:
    return {
        output.name: Tensor.of_raw(output.datatype, list(output.shape), raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }
