"""A gateway with its own Triton, for some of the reference models and scripted models."""

from collections.abc import Iterable
from pathlib import Path

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def embedded(folder: Path, models_venv: Path, models: Iterable[str], pipelines: Iterable[str]) -> dict[str, str]:
    """Creates the repository and a ``gateway.yaml`` without samples. Returns the settings of the gateway."""
    repository = folder / "models"
    repository.mkdir()
    for name in models:
        source = HERE / "models" / name
        (repository / name).symlink_to(source if source.exists() else ROOT / "triton_models" / name)
    return {
        "embedded": "true",
        "embedded_repository": str(repository),
        "embedded_venv": str(models_venv),
        "config": config_with(folder, pipelines),
    }


def config_with(folder: Path, pipelines: Iterable[str]) -> str:
    """Creates a ``gateway.yaml`` without samples: a gateway with a few pipelines starts fast. Returns its path."""
    path = folder / "gateway.yaml"
    known = yaml.safe_load((ROOT / "gateway.yaml").read_text())["pipelines"]
    known |= yaml.safe_load((HERE / "gateway.yaml").read_text())["pipelines"]
    shown = {name: {key: value for key, value in known[name].items() if key != "sample"} for name in pipelines}
    path.write_text(yaml.safe_dump({"pipelines": shown}))
    return str(path)
