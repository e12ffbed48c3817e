"""TEXT -> EMBEDDING and TOKENS; all requests of a batch in one pass of the network."""

import numpy as np
from model_kit.sentence_encoder import SentenceEncoder
from model_kit.serving import answer_batch, input_of
from model_kit.texts import texts_of


class TritonPythonModel:
    def initialize(self, args):
        self._encoder = SentenceEncoder()
        self._encoder.vectors_of(["The first pass reads the weights from the disk."])

    def execute(self, requests):
        return answer_batch(requests, lambda request: texts_of(input_of(request, "TEXT")), self._answers)

    def _answers(self, requests):
        vectors, counts = self._encoder.encode([text for texts in requests for text in texts])
        ends = np.cumsum([len(texts) for texts in requests])[:-1]
        rows = zip(np.split(vectors, ends), np.split(counts, ends), strict=True)
        return [{"EMBEDDING": embedding, "TOKENS": tokens} for embedding, tokens in rows]
