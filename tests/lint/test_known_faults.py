"""The known faults of Triton: each fires on its example, and is silent on its neighbour."""

import re
from pathlib import Path

import pytest

from app.lint.findings import Severity, known_faults
from app.lint.known_faults import FaultsMet, version_of
from app.triton.repository import read_repository

FAULTS = known_faults().faults
OF_MODELS = {code: fault for code, fault in FAULTS.items() if fault.example}


def met(folder: Path, models: dict[str, str], version: str) -> FaultsMet:
    for name, config in models.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
    return FaultsMet(read_repository(folder), version_of(version))


@pytest.mark.parametrize("code", OF_MODELS)
def test_a_fault_fires_on_its_example_until_its_fix_and_not_on_its_neighbour(code: str, tmp_path: Path) -> None:
    fault = FAULTS[code]
    example, neighbour = (
        met(tmp_path / name, models, "2.30") for name, models in (("a", fault.example), ("b", fault.neighbour))
    )
    assert code in example.codes
    assert code not in neighbour.codes
    is_reported = code in {each.code for each in example.findings()}
    assert is_reported == (not fault.kept and bool(fault.solution))
    if fault.fixed:
        fixed = FaultsMet(read_repository(tmp_path / "a"), version_of(fault.fixed))
        assert code not in {each.code for each in fixed.findings()}


@pytest.mark.parametrize("code", FAULTS)
def test_each_fault_names_its_source(code: str) -> None:
    fault = FAULTS[code]
    assert all(re.fullmatch(r"(server|core|python_backend|tensorrtllm_backend)#\d+", each) for each in fault.reports)
    assert bool(fault.fixed) == bool(re.search(r"[0-9a-f]{7}, in r\d\d\.\d\d", fault.dated)) or not fault.fixed
    assert fault.kept or fault.example, "a fault that any model meets has to be kept from Triton"
    assert fault.severity in {Severity.WARNING, Severity.HINT}
