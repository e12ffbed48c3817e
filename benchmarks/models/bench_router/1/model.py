"""FEATURES -> the same once for each head; ``feature_router`` for features of any size."""

from model_kit.serving import answer_each, input_of


class TritonPythonModel:
    def execute(self, requests):
        return answer_each(requests, self._answer)

    def _answer(self, request):
        features = input_of(request, "FEATURES")
        return {"B_FEATURES": features, "C_FEATURES": features}
