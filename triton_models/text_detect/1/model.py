"""IMAGE (one encoded image) -> BOXES: the positions of its lines of text; may be empty."""

from model_kit.deadline import deadline_check
from model_kit.images import pixels_of, single_image
from model_kit.parameters import parameter_of
from model_kit.serving import answer_each, input_of

from .detector import Detector


class TritonPythonModel:
    def initialize(self, args):
        self._detector = Detector(
            pixel_budget=int(parameter_of(args, "pixel_budget")), max_boxes=int(parameter_of(args, "max_boxes"))
        )

    def execute(self, requests):
        return answer_each(requests, self._answer)

    def _answer(self, request):
        deadline_check(request)()
        pixels = pixels_of(single_image(input_of(request, "IMAGE")))
        return {"BOXES": self._detector.boxes_in(pixels)[None]}
