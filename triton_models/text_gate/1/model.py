"""FOUND (boxes) -> BOXES to read, or an early exit for this request."""

from model_kit.serving import answer_each, input_of

from .decision import boxes_worth_reading


class TritonPythonModel:
    def execute(self, requests):
        return answer_each(requests, self._answer)

    def _answer(self, request):
        return {"BOXES": boxes_worth_reading(input_of(request, "FOUND"))}
