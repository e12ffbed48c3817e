"""Joins the texts of a sequence, whose state it finds by the id that Triton wrote into the control tensor."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.states = {}

    def execute(self, requests):
        return [self._response(request) for request in requests]

    def _response(self, request):
        given = {tensor.name(): tensor.as_numpy().reshape(-1)[0] for tensor in request.inputs()}
        own_id = given.get("ID", request.correlation_id())
        own_id = own_id.decode() if isinstance(own_id, bytes) else str(own_id)
        starts = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        before = "" if starts else self.states.get(own_id, "")
        self.states[own_id] = joined = before + given["TEXT"].decode()
        return pb_utils.InferenceResponse([_text("JOINED", joined), _text("SEEN_ID", own_id)])


def _text(name, text):
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=object))
