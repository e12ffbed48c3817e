"""TEXT, TOPICS and SENTIMENTS -> the same tensors, or an error for invalid input.

This is the first step, because in Triton 2.51 an error of a step can crash the server while another step runs
(docs/explanation/triton-crash-fan-out.md). The heads of an ensemble must not receive invalid input.
"""

from model_kit.serving import answer_each, input_of
from model_kit.texts import texts_of
from model_kit.zero_shot import labels_of


class TritonPythonModel:
    def execute(self, requests):
        return answer_each(requests, self._answer)

    def _answer(self, request):
        text, topics, sentiments = (input_of(request, name) for name in ("TEXT", "TOPICS", "SENTIMENTS"))
        texts_of(text)
        for labels in (*topics, *sentiments):
            labels_of(labels)
        return {"GOOD_TEXT": text, "GOOD_TOPICS": topics, "GOOD_SENTIMENTS": sentiments}
