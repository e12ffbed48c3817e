"""TEXT back, and how many requests were answered TOGETHER.

SCRIPT is JSON: ``text``; ``exit`` (a reason); ``raise`` (a text, which fails the whole batch).
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
