"""The script of a slow model that writes a file when it is cancelled, for clients that disconnect."""

import json
import time
from pathlib import Path

CHUNKS = 3
"""Number of events to read before the client disconnects."""
WAIT_S = 5.0


def slow_script(notice: Path) -> str:
    """Returns a script with 60 responses in 6 s."""
    notice.unlink(missing_ok=True)
    return json.dumps({"outputs": 60, "interval_s": 0.1, "notice": str(notice)})


def sent_until_cancelled(notice: Path) -> int | None:
    """Returns how many responses the model sent before it was cancelled. None means that it was not cancelled."""
    ends = time.monotonic() + WAIT_S
    while time.monotonic() < ends:
        if notice.exists() and notice.read_text():
            return int(notice.read_text().split()[1])
        time.sleep(0.02)
    return None
