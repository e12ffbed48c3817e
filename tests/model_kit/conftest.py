"""model_kit is not installed in the gateway's environment, so its tests add it to the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "model_kit/src"))
