"""The modules of a Triton model are imported from its own folder, like the Python backend does it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += map(str, (ROOT / "model_kit" / "src", *sorted((ROOT / "triton_models").glob("*/1"))))
