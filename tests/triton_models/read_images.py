"""Prints texts, scores and boxes of the images in its arguments. The Python of the models runs this script."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def package_of(model):
    """Registers the folder ``1`` of a model as a package, like the Python backend."""
    package = ModuleType(model)
    package.__path__ = [str(ROOT / "triton_models" / model / "1")]
    sys.modules[model] = package


def main(paths):
    for model in ("text_detect", "text_recognize"):
        package_of(model)
    detector = importlib.import_module("text_detect.detector").Detector(pixel_budget=614_400, max_boxes=100)
    recognizer = importlib.import_module("text_recognize.recognizer").Recognizer()
    decode = importlib.import_module("model_kit.images").pixels_of
    answers = {}
    for path in paths:
        pixels = decode(Path(path).read_bytes())
        boxes = detector.boxes_in(pixels)
        texts, scores = recognizer.read(pixels, boxes) if len(boxes) else ([], [])
        answers[Path(path).stem] = {"texts": texts, "scores": scores, "boxes": boxes.tolist()}
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1:])
