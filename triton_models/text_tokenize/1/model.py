"""Text -> token ids."""

from pathlib import Path

from model_kit.serving import answer_each, input_of
from text_encoder import Encoder


class TritonPythonModel:
    def initialize(self, args):
        self._encoder = Encoder(Path(__file__).with_name("tokenizer.json"))

    def execute(self, requests):
        return answer_each(requests, self._answer)

    def _answer(self, request):
        return {"TOKEN_IDS": self._encoder.ids_of(input_of(request, "PROMPT")[0])}
