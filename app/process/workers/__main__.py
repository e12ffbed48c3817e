"""``python -m app.process.workers``: a worker. Only its parent calls it."""

import ctypes
import logging
import os
import pickle
import signal
import sys

import uvloop

from app.config.document import ConfigError
from app.observability.log import configure_logging
from app.process.listening import ListeningPortTaken
from app.process.serving import serve
from app.process.supervision import BackgroundTaskFailed
from app.process.workers.worker import Worker

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serves until SIGTERM. Standard input has the pickled Worker. Returns the exit status."""
    worker: Worker = pickle.load(sys.stdin.buffer)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing else would stop the worker without its parent
    if os.getppid() != worker.parent:
        return 0
    worker.board.keep_metrics()
    settings, own = worker.settings, {"worker": worker.triton.share.number}
    configure_logging(settings.log_level, settings.log_format, own)
    try:
        uvloop.run(serve(settings, worker))
    except (ConfigError, ListeningPortTaken) as exc:
        logging.getLogger(__name__).error("%s", exc)
        return 2
    except BackgroundTaskFailed:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
