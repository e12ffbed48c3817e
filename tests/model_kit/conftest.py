"""The models' kit is not installed beside the gateway: its tests put it on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "model_kit/src"))
