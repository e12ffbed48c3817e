"""Two transformers: one forwards numbers, one decodes an image. This project is not installed in its environment."""

import base64

import numpy as np
from kserve import InferInput, InferRequest, Model, ModelServer


class Numbers(Model):
    """Forwards requests of the Open Inference Protocol unchanged."""


class Image(Model):
    def preprocess(self, payload, headers=None):
        image = base64.b64decode(payload["instances"][0]["image"]["b64"])
        tensor = InferInput("FILE", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([image], np.object_))
        return InferRequest(self.name, [tensor])

    def postprocess(self, result, headers=None):
        return {"predictions": result.outputs[0].as_numpy().tolist()}


if __name__ == "__main__":
    transformers = [Numbers("bench_identity"), Image("bench_file")]
    for transformer in transformers:
        transformer.load()
    ModelServer().start(transformers)
