import sys
from pathlib import Path

import pytest

from app.launcher.interpreter import Interpreter, candidates, choose, inspect, model_candidates, refusal

SHARED = "/usr/lib"


def interpreter(version, library_folder=SHARED):
    return Interpreter(Path(f"/usr/bin/python{version[1]}"), version, library_folder)


@pytest.mark.parametrize(
    ("version", "library_folder", "runs"),
    [
        *(((3, minor), SHARED, True) for minor in (10, 11, 12)),
        ((3, 11), "", True),
        ((3, 9), SHARED, False),
        ((3, 13), SHARED, False),
        ((3, 12), None, False),
    ],
)
def test_3_10_to_3_12_with_a_shared_library_run_models(version, library_folder, runs):
    assert interpreter(version, library_folder).runs_models is runs


def test_the_first_suitable_interpreter_is_chosen():
    answers = {
        Path("a"): None,
        Path("b"): interpreter((3, 13)),
        Path("c"): interpreter((3, 11)),
        Path("d"): interpreter((3, 12)),
    }
    assert choose(answers, answers.get, lambda found: found.runs_models) == answers[Path("c")]
    assert choose([Path("a")], lambda _: None, lambda found: found.runs_models) is None


def test_candidates_are_the_current_python_path_and_pyenv(tmp_path):
    on_path = tmp_path / "bin" / "python3.12"
    by_pyenv = tmp_path / "pyenv" / "versions" / "3.10.13" / "bin" / "python3"
    for each in (on_path, by_pyenv):
        each.parent.mkdir(parents=True)
        each.touch(mode=0o755)
    environment = {"PATH": str(on_path.parent), "PYENV_ROOT": str(tmp_path / "pyenv")}
    assert model_candidates(environment) == [Path(sys._base_executable), on_path, by_pyenv]


def test_duplicate_candidates_are_removed(tmp_path):
    environment = {"PATH": str(Path(sys._base_executable).parent), "PYENV_ROOT": str(tmp_path)}
    found = candidates(("python3",), environment)
    assert len(found) == len(set(found))


def test_inspect_returns_the_version():
    assert inspect(Path(sys.executable)).version == sys.version_info[:2]


@pytest.mark.parametrize("path", ["/nonexistent/python3", "/bin/false"])
def test_a_program_without_an_answer_is_not_an_interpreter(path):
    assert inspect(Path(path)) is None


def test_the_error_suggests_a_remedy():
    assert "pyenv install 3.12" in refusal(None)
    assert "/opt/python3.13 cannot run the models" in refusal(Path("/opt/python3.13"))
