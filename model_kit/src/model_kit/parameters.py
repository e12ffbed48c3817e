"""Constants of a model that its operator may change: the ``parameters`` of ``config.pbtxt``."""

import json
from collections.abc import Mapping


def parameter_of(args: Mapping[str, str], name: str) -> str:
    """The value of a parameter, from what Triton hands to ``initialize``.

    Raises:
        KeyError: config.pbtxt does not set it; there are no hidden defaults.
    """
    return json.loads(args["model_config"])["parameters"][name]["string_value"]
