"""Adds model_kit to the path, because it is not installed in the gateway's environment."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "model_kit/src"))
