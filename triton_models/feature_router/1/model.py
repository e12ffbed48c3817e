"""FEATURES -> a copy of the tensor for each head, for backends that cannot share it (docs/explanation/fan-out.md)."""

from model_kit.serving import answer_each, input_of


class TritonPythonModel:
    def execute(self, requests):
        return answer_each(requests, self._answer)

    def _answer(self, request):
        features = input_of(request, "FEATURES")
        return {"TOPIC_FEATURES": features, "SENTIMENT_FEATURES": features}
