import importlib.util
from dataclasses import replace

import pytest


@pytest.fixture(scope="module")
def bootstrap(pytestconfig):
    spec = importlib.util.spec_from_file_location("bootstrap", pytestconfig.rootpath / "deploy" / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(importlib.sys.modules, "bootstrap", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def environment(bootstrap, tmp_path):
    """A finished environment."""
    lock = tmp_path / "lock.txt"
    lock.write_text("numpy==1.26.4\n")
    made = bootstrap.Environment(tmp_path / ".venv", lock, ())
    made.python.parent.mkdir(parents=True)
    made.python.touch()
    made.stamp.write_text(made.fingerprint())
    return made


def test_finished_environment_is_left_alone(environment):
    assert environment.is_current()


def test_changed_lock_is_noticed(environment):
    environment.lock.write_text("numpy==1.26.3\n")
    assert not environment.is_current()


def test_half_made_environment_is_noticed(environment):
    environment.stamp.unlink()
    assert not environment.is_current()


def test_a_missing_interpreter_of_an_environment_is_noticed(environment):
    environment.python.unlink()
    assert not environment.is_current()


def test_other_choice_of_interpreter_is_noticed(environment):
    assert not replace(environment, chosen="/opt/python3.12").is_current()


def test_moved_checkout_is_noticed(environment, tmp_path):
    moved = replace(environment, folder=tmp_path / "moved")
    environment.folder.rename(moved.folder)
    assert not moved.is_current()


def test_stamp_is_written_last(bootstrap, environment, monkeypatch):
    monkeypatch.setattr(bootstrap, "is_whole", lambda *_: True)
    python = bootstrap.Interpreter(environment.python, (3, 11), "")
    with pytest.raises(KeyboardInterrupt), bootstrap.being_made(environment, python):
        raise KeyboardInterrupt
    assert not environment.is_current()
    with bootstrap.being_made(environment, python):
        pass
    assert environment.is_current()


def test_unfit_machine_ends_the_set_up_with_the_reason(bootstrap, monkeypatch):
    unfit = bootstrap.machine.Machine("Darwin", "arm64", None, False)
    monkeypatch.setattr(bootstrap.machine.Machine, "here", lambda: unfit)
    with pytest.raises(SystemExit, match="needs Linux, this is Darwin"):
        bootstrap.require_fit_machine()


def test_missing_interpreters_end_the_set_up_with_the_way_out(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.interpreter, "candidates", lambda *_: [])
    with pytest.raises(SystemExit, match=r"Python 3\.11 to 3\.13.*make run PYTHON="):
        bootstrap.find_gateway_python()
    with pytest.raises(SystemExit, match="MODELS_PYTHON="):
        bootstrap.find_models_python()


def test_the_checkouts_own_environment_is_not_used_for_setup(bootstrap, monkeypatch):
    monkeypatch.setenv("PATH", f"{bootstrap.ROOT}/.venv/bin:/usr/bin")
    assert bootstrap.outside_checkout()["PATH"] == "/usr/bin"


def test_tools_write_inside_the_checkout_only(bootstrap):
    for name in ("PIP_CACHE_DIR", "UV_CACHE_DIR", "TMPDIR"):
        assert bootstrap.TOOL_ENVIRONMENT[name].startswith(str(bootstrap.ROOT))


def test_failed_command_is_shown(bootstrap):
    with pytest.raises(SystemExit, match=r"(?s)status 1.*/bin/false"):
        bootstrap.run("/bin/false")
