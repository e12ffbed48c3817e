"""Clients that leave a stream: the script of a slow model, which writes a notice when it is cancelled."""

import json
import time
from pathlib import Path

CHUNKS = 3
"""Number of events to read before the client disconnects."""
WAIT_S = 5.0


def slow_script(notice: Path) -> str:
    """60 responses in 6 s."""
    notice.unlink(missing_ok=True)
    return json.dumps({"outputs": 60, "interval_s": 0.1, "notice": str(notice)})


def sent_until_cancelled(notice: Path) -> int | None:
    """How many responses the model sent. None if it is not cancelled."""
    ends = time.monotonic() + WAIT_S
    while time.monotonic() < ends:
        if notice.exists() and notice.read_text():
            return int(notice.read_text().split()[1])
        time.sleep(0.02)
    return None
