"""COUNT -> LABELS by a BLS script: the detector, and the classifier for batches of its crops, beside each other."""

import asyncio

import numpy as np
from model_kit.bls import answer_together, call
from model_kit.serving import input_of

BATCH = 16


class TritonPythonModel:
    async def execute(self, requests):
        return await answer_together(requests, self._answer)

    async def _answer(self, request):
        (crops,) = await call(request, "detect", {"COUNT": input_of(request, "COUNT")}, ["CROPS"], ())
        parts = [crops[start : start + BATCH] for start in range(0, len(crops), BATCH)]
        calls = [call(request, "classify", {"CROP": part}, ["LABEL"], ()) for part in parts]
        labels = [found for (found,) in await asyncio.gather(*calls)]
        return {"LABELS": np.concatenate(labels) if labels else np.empty((0, 1), np.int32)}
