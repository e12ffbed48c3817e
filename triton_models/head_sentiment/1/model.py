"""FEATURES and SENTIMENTS -> SENTIMENT, the best label, and SENTIMENT_SCORES, in the order of the labels."""

from pathlib import Path

from model_kit.parameters import parameter_of
from model_kit.sentence_encoder import SentenceEncoder
from model_kit.serving import answer_each, input_of
from model_kit.zero_shot import ZeroShot, answer_of


class TritonPythonModel:
    def initialize(self, args):
        labels = Path(__file__).with_name("labels.json")
        self._classify = ZeroShot.from_file(
            labels, SentenceEncoder().vectors_of, float(parameter_of(args, "sharpness"))
        )

    def execute(self, requests):
        return answer_each(requests, self._answer)

    def _answer(self, request):
        best, scores = answer_of(self._classify, input_of(request, "FEATURES"), input_of(request, "SENTIMENTS"))
        return {"SENTIMENT": best, "SENTIMENT_SCORES": scores}
