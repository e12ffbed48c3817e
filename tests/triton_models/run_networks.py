"""Reads the images in its arguments, or without any encodes the JSON texts of standard input, one by one and together.

The Python of the models runs this script. It prints texts, scores and boxes by image, or vectors.
"""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def vectors_of(texts):
    encoder = importlib.import_module("model_kit.sentence_encoder").SentenceEncoder()
    alone = [encoder.vectors_of([text])[0].tolist() for text in texts]
    return {"alone": alone, "together": encoder.vectors_of(texts).tolist()}


def lines_in(paths):
    for model in ("text_detect", "text_recognize"):
        package = ModuleType(model)  # the folder ``1`` of the model, as the Python backend registers it
        package.__path__ = [str(ROOT / "triton_models" / model / "1")]
        sys.modules[model] = package
    detector = importlib.import_module("text_detect.detector").Detector(pixel_budget=614_400, max_boxes=100)
    recognizer = importlib.import_module("text_recognize.recognizer").Recognizer()
    decode = importlib.import_module("model_kit.images").pixels_of
    answers = {}
    for path in paths:
        pixels = decode(Path(path).read_bytes())
        boxes = detector.boxes_in(pixels)
        texts, scores = recognizer.read(pixels, boxes) if len(boxes) else ([], [])
        answers[Path(path).stem] = {"texts": texts, "scores": scores, "boxes": boxes.tolist()}
    return answers


if __name__ == "__main__":
    json.dump(lines_in(sys.argv[1:]) if sys.argv[1:] else vectors_of(json.load(sys.stdin)), sys.stdout)
