"""Copies X to Y."""

from model_kit.serving import answer_each, input_of


class TritonPythonModel:
    def execute(self, requests):
        return answer_each(requests, lambda request: {"Y": input_of(request, "X")})
