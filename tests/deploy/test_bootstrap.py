from dataclasses import replace

import pytest


@pytest.fixture
def environment(bootstrap, tmp_path):
    """A complete environment."""
    lock = tmp_path / "lock.txt"
    lock.write_text("numpy==1.26.4\n")
    made = bootstrap.Environment(tmp_path / ".venv", lock, ())
    made.python.parent.mkdir(parents=True)
    made.python.touch()
    made.stamp.write_text(made.fingerprint())
    return made


def test_a_complete_environment_is_current(environment):
    assert environment.is_current()


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.lock.write_text("numpy==1.26.3\n"),
        lambda made: made.stamp.unlink(),
        lambda made: made.python.unlink(),
        lambda made: replace(made, chosen="/opt/python3.12"),
        lambda made: replace(made, folder=made.folder.rename(made.folder.with_name("moved"))),
    ],
    ids=["changed lock", "incomplete", "no interpreter", "another interpreter", "moved"],
)
def test_a_changed_environment_is_stale(environment, change):
    changed = change(environment)
    assert not (changed if isinstance(changed, type(environment)) else environment).is_current()


def test_the_stamp_is_written_last(bootstrap, environment, monkeypatch):
    monkeypatch.setattr(bootstrap, "is_whole", lambda *_: True)
    python = bootstrap.Interpreter(environment.python, (3, 11), "")
    with pytest.raises(KeyboardInterrupt), bootstrap.being_made(environment, python):
        raise KeyboardInterrupt
    assert not environment.is_current()
    with bootstrap.being_made(environment, python):
        pass
    assert environment.is_current()


def test_an_unsupported_machine_stops_setup_with_a_reason(bootstrap, monkeypatch):
    unfit = bootstrap.machine.Machine("Darwin", "arm64", None, False)
    monkeypatch.setattr(bootstrap.machine.Machine, "here", lambda: unfit)
    with pytest.raises(SystemExit, match="needs Linux, this is Darwin"):
        bootstrap.require_fit_machine()


def test_an_unfit_chosen_python_stops_setup(bootstrap, monkeypatch):
    chosen = replace(bootstrap.MODELS, chosen="/nonexistent/python3.12")
    monkeypatch.setattr(bootstrap, "MODELS", chosen)
    with pytest.raises(SystemExit, match=r"/nonexistent/python3\.12 cannot run the models"):
        bootstrap.find_models_python()


def test_the_checkouts_own_environment_is_not_used_for_setup(bootstrap, monkeypatch):
    monkeypatch.setenv("PATH", f"{bootstrap.ROOT}/.venv/bin:/usr/bin")
    assert bootstrap.outside_checkout()["PATH"] == "/usr/bin"


def test_tools_write_inside_the_checkout_only(bootstrap):
    for name in ("PIP_CACHE_DIR", "UV_CACHE_DIR", "TMPDIR"):
        assert bootstrap.TOOL_ENVIRONMENT[name].startswith(str(bootstrap.ROOT))


def test_the_error_names_the_failed_command(bootstrap):
    with pytest.raises(SystemExit, match=r"(?s)status 1.*/bin/false"):
        bootstrap.run("/bin/false")
