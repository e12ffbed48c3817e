"""Each configuration that Triton refuses has a finding; each neighbour that Triton loads has none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from app.core.model import Finding
from app.lint.findings import Severity, check_of
from app.lint.linter import check
from app.triton.repository import read_repository
from tests.toolkit.refused_configurations import (
    COMPLETING,
    ENSEMBLE,
    IN,
    IN_MAP,
    MODEL,
    OUT,
    OUT_MAP,
    PYTHON,
    REFUSED,
    Refused,
    ident,
)

Findings = Callable[..., list[Finding]]


@pytest.fixture
def errors_of(tmp_path: Path) -> Findings:
    def errors_of(*, severity: Severity = Severity.ERROR) -> list[Finding]:
        return [each for each in check(read_repository(tmp_path)) if check_of(each).severity is severity]

    return errors_of


def write(repository: Path, config: str, script: str = "", *, folder: str = "m") -> None:
    Refused("", "", "", "%s", config, config, script).write(repository, folder)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case.code}: {case.text}")
def test_each_refused_configuration_has_its_finding(tmp_path: Path, errors_of: Findings, case: Refused) -> None:
    ident(tmp_path)
    case.write(tmp_path, "m")
    found = errors_of()
    assert (case.code, case.text, "m_broken") in [(each.code, each.text, each.model) for each in found]
    assert {each.model for each in found} == {"m_broken"}


UNTYPED = PYTHON + 'input { name: "i" } output { name: "o" dims: [ 3 ] }'


NOT_COMPLETED = {
    "input 'i' has no data_type: declare it",
    "input 'i' has no dims: declare them, for instance `dims: [ -1 ]`",
    "output 'o' has no data_type: declare it",
}


@pytest.mark.parametrize(
    ("config", "script", "texts"),
    [
        # tensors that a script or a backend may complete
        (UNTYPED, COMPLETING, set()),
        (UNTYPED, "\n\nclass Base:\n    pass\n\n\nclass TritonPythonModel(Base):\n    pass\n", set()),
        (UNTYPED, "", NOT_COMPLETED),
        (UNTYPED.replace("python", "onnxruntime"), "", set()),
        (UNTYPED.replace("python", "custom"), "", set()),
        (UNTYPED.replace("python", "pytorch"), "", NOT_COMPLETED),
        (MODEL + IN, "", {"input 'i' is declared twice, and each request fails: remove one"}),
    ],
)
def test_the_tensors_of_a_configuration(
    tmp_path: Path, errors_of: Findings, config: str, script: str, texts: set[str]
) -> None:
    write(tmp_path, config, script)
    assert {each.text for each in errors_of()} == texts


def test_a_key_that_a_map_of_a_step_has_twice_is_the_only_finding(tmp_path: Path, errors_of: Findings) -> None:
    ident(tmp_path)
    steps = f'step {{ model_name: "ident" {IN_MAP} {OUT_MAP} %s }}'
    for field, name, value in (("output_map", "o", "p"), ("input_map", "i", "j")):
        again = f'{field} {{ key: "{name}" value: "{value}" }}'
        write(tmp_path, f"{ENSEMBLE}ensemble_scheduling {{ {steps % again} }}", folder=field)
        (found,) = {each for each in errors_of() if each.model == f"{field}_broken"}
        assert (found.code, found.step) == ("duplicate-key", 1)
        assert found.text.startswith(
            f"step 1 ('ident'): {field} has the key '{name}' twice; Triton uses only the last, '{value}': "
        )


@pytest.mark.parametrize(
    ("maps", "folder"), [(f"{IN_MAP} {OUT_MAP} {OUT_MAP}", "m"), (f"{IN_MAP} {OUT_MAP}", "a b")], ids=["twice", "blank"]
)
def test_a_repeated_entry_and_a_blank_in_the_name_of_an_ensemble_are_fine(
    tmp_path: Path, errors_of: Findings, maps: str, folder: str
) -> None:
    ident(tmp_path)
    write(tmp_path, f'{ENSEMBLE}ensemble_scheduling {{ step {{ model_name: "ident" {maps} }} }}', folder=folder)
    assert not errors_of()


def test_a_parameter_that_is_overwritten_is_a_warning(tmp_path: Path, errors_of: Findings) -> None:
    entries = [f'parameters {{ key: "limit" value {{ string_value: "{value}" }} }}' for value in (1, 2)]
    write(tmp_path, MODEL + "\n".join(entries))
    texts = {each.text for each in errors_of(severity=Severity.WARNING)}
    assert texts == {"parameters has the key 'limit' twice; Triton uses only the last, '2': correct or remove one"}
    assert not errors_of()


@pytest.mark.parametrize("name", ["bert base", "a;b", "a$b", "bert(base)", "it's", "#1", "{a,b}"])
def test_a_name_that_a_shell_splits_is_an_error(tmp_path: Path, errors_of: Findings, name: str) -> None:
    write(tmp_path, MODEL, folder=name)
    assert {each.code for each in errors_of()} == {"folder-name"}
    assert f"the folder is '{name}_broken', and Triton 2.51 never loads such a model: use " in errors_of()[0].text


@pytest.mark.parametrize("name", ["a#b", "a=b", "a~b", "a[1]", "a@b,c+d:e%f", "a{b}", "größe"])
def test_other_names_are_fine(tmp_path: Path, errors_of: Findings, name: str) -> None:
    write(tmp_path, MODEL, folder=name)
    assert not errors_of()


@pytest.mark.parametrize("name", [".git", "__pycache__", "notes"])
def test_a_folder_that_is_no_model_is_an_error(tmp_path: Path, errors_of: Findings, name: str) -> None:
    """Triton tries to load each folder, and does not start."""
    ident(tmp_path)
    (tmp_path / name / "refs").mkdir(parents=True)
    (found,) = errors_of()
    assert (found.model, found.code) == (name, "unknown-version")
    assert (
        found.text == "the folder has no config.pbtxt and no version, and Triton loads each folder: move it elsewhere"
    )


def test_a_model_without_a_backend_is_an_error(tmp_path: Path, errors_of: Findings) -> None:
    write(tmp_path, IN + OUT)
    (tmp_path / "m_broken" / "1" / "model.py").unlink()
    assert [(each.model, each.code) for each in errors_of()] == [("m_broken", "invalid-setting")]


def test_only_the_versions_that_triton_loads_need_a_script(tmp_path: Path, errors_of: Findings) -> None:
    write(tmp_path, MODEL)
    (tmp_path / "m_broken" / "2").mkdir()
    (tmp_path / "m_sound" / "0").mkdir()
    assert [(each.model, each.code) for each in errors_of()] == [("m_broken", "missing-script")]


def test_a_step_cannot_use_a_version_that_the_policy_leaves_out(tmp_path: Path, errors_of: Findings) -> None:
    ident(tmp_path)
    step = f'step {{ model_name: "ident" model_version: 1 {IN_MAP} {OUT_MAP} }}'
    write(tmp_path, f"{ENSEMBLE}ensemble_scheduling {{ {step} }}")
    assert not errors_of()
    (tmp_path / "ident" / "2").mkdir()
    (tmp_path / "ident" / "2" / "model.py").touch()
    assert {each.text for each in errors_of()} == {"step 1 ('ident') needs version 1 of a model that loads 2"}
