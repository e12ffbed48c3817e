"""The deadline of a request, which the gateway sends as a request parameter.

Triton does not cancel the steps of an ensemble. So a step that works for long compares this time with its own clock.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from model_kit.outcomes import Cancelled

PARAMETER = "deadline_unix_ms"


def deadline_check(request: Any) -> Callable[[], None]:
    """What a step calls between pieces of its work. It raises Cancelled after the deadline, and without one never."""
    deadline_ms = json.loads(request.parameters() or "{}").get(PARAMETER)

    def check() -> None:
        if deadline_ms is not None and time.time() * 1000 > deadline_ms:
            raise Cancelled

    return check
