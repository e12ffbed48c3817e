"""``python -m app.process.workers``: a worker. Only its parent calls it."""

import sys

from app.process.workers.worker import main

sys.exit(main())
