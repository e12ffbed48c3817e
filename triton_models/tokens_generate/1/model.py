"""Token ids -> the new tokens, response by response; also handles the call that cancels another request."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
from model_kit.outcomes import InvalidInput
from model_kit.serving import bytes_tensor, input_of
from model_kit.streaming import Part, stream_each
from tokens_cancellation import Cancellations
from tokens_generation import checked_prompt, generate
from tokens_parameters import wishes_of
from tokens_transformer import Network
from tokens_workers import Workers

_RUNNING_AT_A_TIME = 8
_CLOSE_TIMEOUT_S = 2.0


class TritonPythonModel:
    def initialize(self, args):
        self._network = Network.from_file(Path(__file__).with_name("weights.npz"))
        self._cancellations = Cancellations()
        self._stopping = threading.Event()
        self._workers = Workers(_RUNNING_AT_A_TIME)

    def execute(self, requests):
        stream_each(requests, self._accept, self._workers.submit)

    def finalize(self):
        self._stopping.set()
        self._workers.close(_CLOSE_TIMEOUT_S)

    def _accept(self, request, is_gone):
        token_ids, cancelled_id = input_of(request, "TOKEN_IDS"), input_of(request, "CANCEL")
        if (token_ids is None) == (cancelled_id is None):
            raise InvalidInput("a request must have either TOKEN_IDS or CANCEL")
        if cancelled_id is None:
            return self._parts(request, token_ids, is_gone)
        self._cancellations.cancel(cancelled_id[0].decode(errors="replace"))
        return None

    def _parts(self, request, token_ids, is_gone):
        prompt_ids = checked_prompt(token_ids, self._network)
        wishes = wishes_of(json.loads(request.parameters() or "{}"))
        cancelled = self._cancellations.watch(request.request_id())

        def is_cancelled():
            return cancelled.is_set() or self._stopping.is_set() or is_gone()

        chunks = generate(self._network, prompt_ids, wishes, is_cancelled)
        return _with_prompt_tokens(map(_part_of, chunks), token_ids.size)


def _with_prompt_tokens(parts, count):
    """Adds the number of the prompt's tokens to the first part."""
    extra = {"PROMPT_TOKENS": np.array([count], np.int32)}
    for part in parts:
        yield replace(part, outputs={**part.outputs, **extra})
        extra = {}


def _part_of(chunk):
    outputs = {"TOKEN_ID": np.array(chunk.token_ids, np.int32)}
    if chunk.finish_reason is None:
        return Part(outputs)
    return Part({**outputs, "FINISH_REASON": bytes_tensor([chunk.finish_reason.encode()], [1])}, is_last=True)
