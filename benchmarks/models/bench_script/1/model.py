"""INPUT -> FIRST by a BLS script: calls the models that the parameter ``bls_calls`` names, in a row."""

import json

from model_kit.bls import answer_together, call
from model_kit.serving import input_of


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        *self._models, self._last = parameters["bls_calls"]["string_value"].split(", ")

    async def execute(self, requests):
        return await answer_together(requests, self._answer)

    async def _answer(self, request):
        data = input_of(request, "INPUT")
        for model in self._models:
            (data,) = await call(request, model, {"INPUT": data}, ["OUTPUT"], ())
        (first,) = await call(request, self._last, {"INPUT": data}, ["FIRST"], ())
        return {"FIRST": first}
