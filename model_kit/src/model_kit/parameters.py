"""Reads constants that operators can change: the ``parameters`` of ``config.pbtxt``."""

import json
from collections.abc import Mapping


def parameter_of(args: Mapping[str, str], name: str) -> str:
    """Returns the value of a parameter, from the arguments of ``initialize``.

    Raises:
        KeyError: If config.pbtxt does not set it; there are no hidden defaults.
    """
    return json.loads(args["model_config"])["parameters"][name]["string_value"]
