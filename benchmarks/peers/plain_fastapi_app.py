"""The plain FastAPI version as a separate process: no limits, metrics, log, disconnect detection or typed errors.

python -m benchmarks.peers.plain_fastapi_app PORT TRITON_GRPC_URL
"""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import uvicorn
from fastapi import FastAPI, UploadFile
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype


class Numbers(BaseModel):
    input: list[float]


class StreamWish(BaseModel):
    count: int
    interval_ms: int = 0


def app_for(triton_url: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with InferenceServerClient(triton_url) as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, bool]:
        return {"ready": await app.state.client.is_server_ready()}

    @app.post("/identity")
    async def identity(numbers: Numbers) -> dict[str, list[float]]:
        tensor = _tensor("INPUT", np.array(numbers.input, np.float32))
        result = await app.state.client.infer("bench_identity", [tensor])
        return {"output": result.as_numpy("OUTPUT").tolist()}

    @app.post("/small")
    async def small(numbers: Numbers) -> dict[str, list[float]]:
        """Calls the model of the benchmark `coalescing` with a batch of one."""
        result = await app.state.client.infer("small", [_tensor("INPUT", np.array([numbers.input], np.float32))])
        return {"output": result.as_numpy("OUTPUT")[0].tolist()}

    @app.post("/file")
    async def size(file: UploadFile) -> dict[str, int]:
        tensor = _tensor("FILE", np.array([await file.read()], np.object_))
        result = await app.state.client.infer("bench_file", [tensor])
        return {"size": int(result.as_numpy("SIZE")[0])}

    @app.post("/ocr")
    async def ocr(file: UploadFile) -> dict[str, object]:
        tensor = _tensor("IMAGE", np.array([[await file.read()]], np.object_))
        try:
            result = await app.state.client.infer("ocr_ensemble", [tensor])
        except InferenceServerException as exc:
            if "ALREADY_EXISTS" in str(exc.status()):
                return {"texts": [], "early_exit": True}
            raise
        return {"texts": [text.decode() for text in result.as_numpy("TEXTS").flat], "early_exit": False}

    @app.post("/stream")
    async def stream(wish: StreamWish) -> StreamingResponse:
        return StreamingResponse(_events(app.state.client, wish), media_type="text/event-stream")

    return app


async def _events(client: InferenceServerClient, wish: StreamWish) -> AsyncIterator[str]:
    async def requests() -> AsyncIterator[dict[str, object]]:
        tensor = _tensor("COUNT", np.array([wish.count], np.int32))
        yield {"model_name": "bench_stream", "inputs": [tensor], "parameters": {"interval_ms": wish.interval_ms}}

    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        text = result.as_numpy("TEXT")
        if text is not None:
            token_ids = result.as_numpy("TOKEN_ID").tolist()
            yield f"data: {json.dumps({'text': text[0].decode(), 'token_id': token_ids})}\n\n"
    yield "data: [DONE]\n\n"


def _tensor(name: str, array: np.ndarray) -> InferInput:
    tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


if __name__ == "__main__":
    port, url = sys.argv[1:]
    uvicorn.run(app_for(url), port=int(port), loop="uvloop", http="httptools", log_level="warning", access_log=False)
