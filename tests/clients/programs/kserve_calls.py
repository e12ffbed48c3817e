"""The calls of KServe's REST client. Arguments: base URL, file that a cancelled model writes."""

import asyncio
import json
import sys
from typing import Any

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import InferResponse, RequestedOutput
from outcomes import async_outcome, show

URL, NOTICE = sys.argv[1:]
VALUES = {
    "BOOL": np.array([[True, False]]),
    "UINT64": np.array([[0, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, 127]], np.int8),
    "FP16": np.array([[0.5, -65504]], np.float16),
    "FP32": np.array([[0.1, -3.4e38]], np.float32),
    "FP64": np.array([[0.1, -1.7e308]]),
    "BYTES": np.array([["", "zwölf"]], np.object_),
}
"""Values by datatype, for the model `typed_echo`."""
LATE = json.dumps({"outputs": 1, "interval_s": 4, "notice": NOTICE})


def tensor(name: str, datatype: str, array: np.ndarray, binary: bool = False) -> InferInput:
    made = InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def texts(name: str, *shape: int, text: str) -> InferInput:
    return tensor(name, "BYTES", np.full(shape, text, np.object_))


def outputs_of(response: InferResponse) -> dict[str, Any]:
    return {
        each.name: [each.datatype, list(each.shape), each.as_numpy().reshape(-1).tolist()] for each in response.outputs
    }


async def main() -> None:
    config = RESTConfig(protocol="v2", retries=0)
    async with InferenceRESTClient(config) as client:

        async def infer(model: str, *inputs: InferInput, binary: bool = False, **options: Any) -> dict[str, Any]:
            wanted = [RequestedOutput(name, {"binary_data": True}) for name in options.pop("binary_outputs", [])]
            request = InferRequest(
                model, list(inputs), request_outputs=wanted or None, parameters=options.pop("of", {})
            )
            return outputs_of(await client.infer(URL, request, model_name=model, **options))

        echoed = {name: tensor(name, name, array, binary=True) for name, array in VALUES.items()}
        in_json = [tensor(name, name, array) for name, array in VALUES.items() if name != "FP16"]
        calls = {
            "server live": lambda: client.is_server_live(URL),
            "server ready": lambda: client.is_server_ready(URL),
            "model ready": lambda: client.is_model_ready(URL, "text_embed"),
            "unknown model ready": lambda: client.is_model_ready(URL, "nobody"),
            "json": lambda: infer("typed_echo", *in_json),
            "binary": lambda: infer("typed_echo", *echoed.values(), binary_outputs=[f"{name}_OUT" for name in VALUES]),
            "binary in, json out": lambda: infer("typed_echo", echoed["FP32"], echoed["BOOL"]),
            "vector": lambda: infer("text_embed", texts("TEXT", 1, 1, text="A cat sleeps.")),
            "unknown model": lambda: infer("nobody", echoed["FP32"]),
            "wrong shape": lambda: infer("batched_echo", tensor("X", "FP32", np.ones((1, 4), np.float32))),
            "failed model": lambda: infer("scripted", texts("SCRIPT", 1, text='{"raise": "a secret"}')),
            "left": lambda: infer("scripted_stream", texts("SCRIPT", 1, text=LATE), timeout=0.5),
        }
        show({name: await async_outcome(call) for name, call in calls.items()})


asyncio.run(main())
