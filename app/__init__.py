"""JSON, files, token streams, WebSockets and OpenAI's API for the models that NVIDIA Triton serves."""

import os
import signal

__version__ = "0.1.0"

if os.getpid() == 1:
    # The kernel drops a signal to process 1 of a container that has no handler, and the imports take a second.
    signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))
