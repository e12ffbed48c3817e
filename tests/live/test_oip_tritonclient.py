"""NVIDIA's unmodified HTTP client with the gateway; an echo gives the expected answers."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from tritonclient import http
from tritonclient.http import aio

from app.core.inference import DTYPE_BY_DATATYPE
from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.processes import GatewayProcess

DATATYPES = [name for name in DTYPE_BY_DATATYPE if name != "BF16"]
"""The client does not support BF16 arrays of numpy."""
FORMS = [
    (datatype, binary_in, binary_out)
    for datatype in DATATYPES
    for binary_in in (True, False)
    for binary_out in (True, False)
    if datatype != "FP16" or (binary_in and binary_out)  # the client rejects FP16 in JSON
]


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> Iterator[Any]:
    with http.InferenceServerClient(urlsplit(gateway.url).netloc) as connected:
        yield connected


@pytest.fixture(scope="module")
def triton_http(triton: EmbeddedTriton) -> Iterator[Any]:
    with http.InferenceServerClient(urlsplit(triton.http_url).netloc) as connected:
        yield connected


def array_of(datatype: str) -> Any:
    if datatype == "BYTES":
        return np.array([[b"a", "zw\u00f6lf".encode()]], dtype=np.object_)
    return np.array([[1, 0]], DTYPE_BY_DATATYPE[datatype])


def request_for(datatype: str, *, binary_in: bool = True, binary_out: bool = True) -> tuple[list[Any], list[Any]]:
    """Returns the inputs and the requested outputs of a request to ``typed_echo``."""
    array = array_of(datatype)
    tensor = http.InferInput(datatype, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary_in)
    return [tensor], [http.InferRequestedOutput(f"{datatype}_OUT", binary_data=binary_out)]


def is_echo(answer: Any, datatype: str) -> bool:
    """A text in JSON comes back as a text, one in bytes as bytes."""
    sent, found = array_of(datatype), answer.as_numpy(f"{datatype}_OUT")
    if datatype == "BYTES":
        found = np.array([[each.encode() if isinstance(each, str) else each for each in found.flat]], np.object_)
    return bool(found.dtype == sent.dtype and np.array_equal(found, sent))


@pytest.mark.parametrize(("datatype", "binary_in", "binary_out"), FORMS)
def test_every_datatype(client: Any, datatype: str, binary_in: bool, binary_out: bool) -> None:
    inputs, outputs = request_for(datatype, binary_in=binary_in, binary_out=binary_out)
    answer = client.infer("typed_echo", inputs, outputs=outputs, request_id="7")
    assert is_echo(answer, datatype)
    assert answer.get_response()["id"] == "7"


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
async def test_the_asyncio_client(gateway: GatewayProcess, compression: str | None) -> None:
    ways = {"request_compression_algorithm": compression, "response_compression_algorithm": compression}
    async with aio.InferenceServerClient(urlsplit(gateway.url).netloc) as connected:
        for datatype in ("FP32", "BYTES", "INT64"):
            inputs, outputs = request_for(datatype)
            answer = await connected.infer("typed_echo", inputs, outputs=outputs, **ways)
            assert is_echo(answer, datatype)
        assert await connected.is_model_ready("typed_echo", "1")


def test_classes_parameters_and_priorities(client: Any, triton_http: Any) -> None:
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
    ours, theirs = (each.infer("batched_echo", [tensor], **options) for each in (client, triton_http))
    assert ours.as_numpy("Y").tolist() == theirs.as_numpy("Y").tolist() == [[b"3.000000:1:dog", b"2.000000:2:fox"]]


def test_metadata_calls_of_the_client(client: Any, triton_http: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("typed_echo")
    assert not client.is_model_ready("nope")
    assert client.get_server_metadata()["name"] == "triton-gateway"
    for model in ("typed_echo", "scripted_chain"):
        assert client.get_model_metadata(model) == triton_http.get_model_metadata(model)
        assert client.get_model_config(model, "1")["input"] == triton_http.get_model_config(model, "1")["input"]
    assert client.get_inference_statistics("scripted_tail") == triton_http.get_inference_statistics("scripted_tail")
    assert {"name": "typed_echo", "version": "1", "state": "READY"} in client.get_model_repository_index()
