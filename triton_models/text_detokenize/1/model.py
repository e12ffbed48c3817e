"""Token ids -> bytes, and the other outputs of a generated response for the caller."""

import json
from pathlib import Path

from model_kit.contract import require_at_most
from model_kit.serving import answer_each, bytes_tensor, input_of
from text_vocabulary import Vocabulary


class TritonPythonModel:
    def initialize(self, args):
        self._vocabulary = Vocabulary.from_file(Path(__file__).with_name("tokenizer.json"))

    def execute(self, requests):
        return answer_each(requests, self._answer)

    def _answer(self, request):
        ids, reason = input_of(request, "NEWEST_IDS"), input_of(request, "NEWEST_REASON")
        require_at_most("NEWEST_IDS", ids, _newest_at_most(request))
        outputs = {"TEXT": bytes_tensor([self._vocabulary.bytes_of(ids)], [1]), "TOKEN_ID": ids}
        passed_on = {"FINISH_REASON": reason, "PROMPT_TOKENS": input_of(request, "PROMPT_SIZE")}
        return outputs | {name: tensor for name, tensor in passed_on.items() if tensor is not None}


def _newest_at_most(request):
    """The ``chunk_tokens`` of the request, which every step can read; the generator has validated it."""
    return json.loads(request.parameters() or "{}").get("chunk_tokens", 1)
