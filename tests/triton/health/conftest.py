import pytest

from app.triton import triton_engine as engine_module
from app.triton.health import health as health_module
from app.triton.health import health_watch as watch_module


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"POLL_S": 0.01, "HUNG_S": 0.25, "DEAD_S": 0.05, "COUNT_S": 0.02}.items():
        monkeypatch.setattr(watch_module, name, value)
    for module in (engine_module, health_module):
        monkeypatch.setattr(module, "SILENCE_S", 0.1)
    for module in (watch_module, health_module):
        monkeypatch.setattr(module, "FIRST_DELAY_S", 0.02)
