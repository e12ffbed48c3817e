"""A Triton that the tests of this folder may kill."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.live.sessions import write_models
from tests.toolkit.processes import running_triton, scripted_models


@pytest.fixture(scope="package")
def mortal_triton(models_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    """A Triton that tests may kill, because it is started again."""
    models = scripted_models(tmp_path_factory.mktemp("chaos") / "models")
    write_models(models, ["int32_oldest"])
    options = EmbeddedOptions(models, models_venv, first_restart_s=0.1, longest_restart_s=1.0)
    with running_triton(options, restarts=True) as server:
        yield server
