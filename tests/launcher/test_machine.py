"""A machine that can run Triton, and a Python that can run the models."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app.launcher.machine import NAMES, Interpreter, Machine, candidates, choose, inspect, refusal, refusals

DEBIAN_12 = Machine(system="Linux", architecture="x86_64", glibc=(2, 36), has_glibcxx=True)


@pytest.mark.parametrize("machine", [DEBIAN_12, replace(DEBIAN_12, architecture="aarch64", glibc=(2, 35))])
def test_a_supported_machine_has_no_refusals(machine):
    assert refusals(machine) == []


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"system": "Darwin"}, ["needs Linux", "Darwin", "--triton HOST:PORT"]),
        ({"architecture": "riscv64"}, ["x86_64 or aarch64", "riscv64", "--triton HOST:PORT"]),
        ({"glibc": (2, 31)}, ["glibc 2.35 or newer", "glibc 2.31", "Debian 12"]),
        ({"glibc": None}, ["glibc 2.35 or newer", "another C library"]),
        ({"has_glibcxx": False}, ["GLIBCXX_3.4.30", "apt-get install libstdc++6"]),
    ],
)
def test_each_missing_requirement_has_a_message_with_a_remedy(facts, expected):
    (message,) = refusals(replace(DEBIAN_12, **facts))
    assert all(word in message for word in expected)


def test_all_missing_requirements_are_reported_together():
    assert len(refusals(replace(DEBIAN_12, glibc=(2, 31), has_glibcxx=False))) == 2


def test_here_reads_the_current_machine():
    here = Machine.here()
    assert here.system
    assert here.architecture


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
    assert candidates(NAMES, environment) == [Path(sys._base_executable), on_path, by_pyenv]


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
