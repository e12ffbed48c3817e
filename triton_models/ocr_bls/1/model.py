"""IMAGE -> BOXES, TEXTS and SCORES; the script makes the decision, instead of a step of an ensemble."""

from model_kit.bls import answer_together, call
from model_kit.images import FAULTS
from model_kit.serving import input_of

from .answers import answer_of, require_text


class TritonPythonModel:
    async def execute(self, requests):
        return await answer_together(requests, self._answer)

    async def _answer(self, request):
        image = input_of(request, "IMAGE")
        (boxes,) = await call(request, "text_detect", {"IMAGE": image}, ["BOXES"], FAULTS)
        require_text(boxes)
        inputs = {"IMAGE": image, "BOXES": boxes}
        return answer_of(boxes, *await call(request, "text_recognize", inputs, ["LINES", "TEXTS", "SCORES"], FAULTS))
