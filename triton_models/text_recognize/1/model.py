"""IMAGE and BOXES -> LINES, TEXTS and SCORES of the legible boxes, in the same order."""

import numpy as np
from model_kit.deadline import deadline_check
from model_kit.images import pixels_of, single_image
from model_kit.parameters import parameter_of
from model_kit.serving import answer_each, bytes_tensor, input_of

from .legible import legible
from .recognizer import Recognizer


class TritonPythonModel:
    def initialize(self, args):
        self._recognizer = Recognizer()
        self._least_score = float(parameter_of(args, "least_score"))

    def execute(self, requests):
        return answer_each(requests, self._answer)

    def _answer(self, request):
        check = deadline_check(request)
        check()
        pixels = pixels_of(single_image(input_of(request, "IMAGE")))
        boxes = input_of(request, "BOXES")[0]
        texts, scores = self._recognizer.read(pixels, boxes, check)
        kept = legible(texts, scores, self._least_score)
        return {
            "LINES": boxes[kept][None],
            "TEXTS": bytes_tensor([texts[line].encode() for line in kept], (1, -1)),
            "SCORES": np.array(scores, dtype=np.float32)[kept][None],
        }
