"""The deadline of a request, which the gateway sends as a request parameter.

Triton does not cancel the steps of an ensemble, so long-running steps compare the deadline with their own clock.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from model_kit.outcomes import Cancelled

PARAMETER = "deadline_unix_ms"


def deadline_check(request: Any) -> Callable[[], None]:
    """Returns a function to call between pieces of work; after the deadline, if there is one, it raises Cancelled."""
    deadline_ms = json.loads(request.parameters() or "{}").get(PARAMETER)

    def check() -> None:
        if deadline_ms is not None and time.time() * 1000 > deadline_ms:
            raise Cancelled

    return check
