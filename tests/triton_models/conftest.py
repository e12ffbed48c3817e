"""Loads the modules of a Triton model from its own folder, like the Python backend."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def load() -> Callable[[str, str], ModuleType]:
    """``load(model, module)`` loads a module from the folder of the model's ``model.py``."""

    def load(model: str, module: str) -> ModuleType:
        for folder in (ROOT / "model_kit/src", ROOT / "triton_models" / model / "1"):
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
        return importlib.import_module(module)

    return load


@pytest.fixture(scope="session")
def network(load):
    """The text model with its committed weights."""
    weights = ROOT / "triton_models/tokens_generate/1/weights.npz"
    return load("tokens_generate", "tokens_transformer").Network.from_file(weights)
