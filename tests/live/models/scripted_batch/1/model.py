"""Returns TEXT, and the number of requests in the batch as TOGETHER.

Keys of SCRIPT (JSON):
    text: the value of TEXT.
    exit: the reason of an early exit.
    raise: the text of an exception, which fails the whole batch.
"""

import json

import numpy as np
from model_kit.outcomes import EarlyExit
from model_kit.serving import answer_each, bytes_tensor, input_of


class TritonPythonModel:
    def execute(self, requests):
        scripts = {id(each): json.loads(input_of(each, "SCRIPT")[0, 0]) for each in requests}
        for script in scripts.values():
            if "raise" in script:
                raise ValueError(script["raise"])
        return answer_each(requests, lambda request: _outputs(scripts[id(request)], len(requests)))


def _outputs(script, together):
    if "exit" in script:
        raise EarlyExit(script["exit"])
    text = bytes_tensor([script["text"].encode()], (1, 1))
    return {"TEXT": text, "TOGETHER": np.array([[together]], dtype=np.int32)}
