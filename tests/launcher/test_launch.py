"""What the machine must have, the models' environment, the arguments of one start, and the log of Triton."""

import logging
import os
import socket
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from app import cli
from app.launcher import launch as launch_module
from app.launcher.embedded_triton import TritonLog
from app.launcher.launch import (
    LOOPBACK,
    PACKAGES,
    PORTS,
    EmbeddedOptions,
    Launch,
    Ports,
    ServedRepository,
    every_folder,
    install_requirements,
    link_backends,
    python_of_models,
)
from app.launcher.machine import (
    NAMES,
    EmbeddedTritonError,
    Interpreter,
    Machine,
    RepositoryUnservable,
    candidates,
    choose,
    inspect,
    refusals,
)
from deploy.python_mirror import write_mirror

PYTHON = Interpreter(Path("/venv/bin/python3"), (3, 11), "/opt/python/lib", "1.26.4", "/wheel")


@pytest.fixture
def launch():
    def launch(is_complete=True, **inherited):
        options = EmbeddedOptions(Path("/models"), Path("/venv"), environment=inherited)
        repository = ServedRepository(Path("/models"), ("ident",), is_complete)
        return Launch(options, Ports(1, 2, 3), repository, PYTHON, "0123", Path("/tmp/folder"))

    return launch


@pytest.mark.parametrize("is_complete", [True, False])
def test_the_arguments_of_the_server(launch, is_complete):
    """A unique name, loopback addresses, frequent pings, and no auto-completion of complete configurations."""
    command = launch(is_complete).command()
    addresses = {each for each in command if "-address" in each}
    assert addresses == {f"--{service}-address=127.0.0.1" for service in ("grpc", "http", "metrics")}
    named = {"--id=0123", "--backend-config=python,shm-region-prefix-name=triton_gateway_0123_"}
    assert named | {"--grpc-http2-max-ping-strikes=0"} <= {*command}
    assert ("--disable-auto-complete-config" in command) is is_complete


def test_models_run_with_their_own_python_one_thread_and_kept_memory(launch):
    assert launch(PATH="/usr/bin", LD_LIBRARY_PATH="/cuda").environment() == {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "MALLOC_TRIM_THRESHOLD_": "67108864",
        "PATH": "/venv/bin:/usr/bin",
        "LD_LIBRARY_PATH": "/opt/python/lib:/cuda",
    }


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_"])
def test_a_variable_of_the_user_is_kept(launch, name):
    assert name not in launch(**{name: "4"}).environment()


def test_only_requests_with_a_parent_span_are_sent(launch):
    assert not any("trace" in argument for argument in launch().command())
    traced = replace(launch().options, traces_url="http://collector:4318/v1/traces")
    command = replace(launch(), options=traced).command()
    assert "--trace-config=opentelemetry,url=http://collector:4318/v1/traces" in command
    assert "--trace-config=rate=2147483647" in command


def test_free_ports_are_below_the_range_for_outgoing_connections() -> None:
    ports = Ports.free()
    assert len({ports.grpc, ports.http, ports.metrics}) == 3
    assert all(port in PORTS for port in (ports.grpc, ports.http, ports.metrics))


def test_any_free_port_is_used_if_all_others_are_taken(monkeypatch) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(launch_module, "PORTS", [port] * 100)
        assert not {0, port} & {*vars(Ports.free()).values()}


def test_without_a_reader_every_folder_is_a_model_that_triton_completes(tmp_path):
    with pytest.raises(RepositoryUnservable):
        every_folder(tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "a").mkdir()
    assert every_folder(tmp_path) == ServedRepository(tmp_path.resolve(), ("a", "b"), is_complete=False)


@pytest.fixture
def venv(tmp_path, models_venv):
    """An environment with the models' interpreter and no packages."""
    python = models_venv / "bin" / "python3"
    subprocess.run([str(python), "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    return tmp_path / "venv"


def test_the_environment_of_the_models_is_usable_and_its_backend_linked_with_the_matching_stub(models_venv, tmp_path):
    python = python_of_models(models_venv)
    assert Path(python.server, "bin", "tritonserver").is_file()
    assert python.runs_models
    link_backends(python, tmp_path / "backends")
    linked = {each.name: each.resolve() for each in (tmp_path / "backends" / "python").iterdir()}
    assert {"libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"} <= linked.keys()
    assert all(each.is_file() for each in linked.values())


@pytest.mark.parametrize(
    ("installed", "text"),
    [
        ({"nvidia-pytriton": "0.7.0", "numpy": "2.1.3"}, r"numpy 2\.1\.3.*corrupts.*numpy<2"),
        ({"numpy": "1.26.4"}, "does not hold the wheel"),
        ({}, "has no numpy, and it does not hold the wheel"),
    ],
    ids=["numpy 2", "no wheel", "nothing"],
)
def test_an_incomplete_environment_is_an_error_with_its_remedy(venv, installed, text):
    (site_packages,) = venv.glob("lib/python3.*/site-packages")
    for name, version in installed.items():  # metadata makes a distribution look installed
        folder = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    with pytest.raises(EmbeddedTritonError, match=text) as caught:
        python_of_models(venv)
    assert f"Run `{venv}/bin/python3 -m pip install 'numpy<2' 'nvidia-pytriton==0.7.0'`." in str(caught.value)


def test_the_error_for_a_missing_environment_has_a_remedy(tmp_path):
    with pytest.raises(EmbeddedTritonError, match=r"make run.*pip install '\.\[embedded\]'"):
        python_of_models(tmp_path)


def test_a_python_without_a_stub_in_the_wheel_is_an_error(tmp_path):
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho '[[3, 13], \"/usr/lib\"]'\n")
    python.chmod(0o755)
    with pytest.raises(EmbeddedTritonError, match=r"3\.10 to 3\.12"):
        python_of_models(tmp_path)


def test_packages_match_the_extra_and_the_lock(pytestconfig):
    extra = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wheel = extra["embedded"][0].partition(";")[0]
    assert f"'{wheel}'" in PACKAGES
    assert {wheel, "numpy<2"} <= set((pytestconfig.rootpath / "requirements" / "triton.in").read_text().splitlines())


@pytest.fixture(scope="module")
def mirror(models_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mirror(models_venv / "bin" / "python3", tmp_path_factory.mktemp("mirror"))


@pytest.fixture
def machine(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without a Python for the models."""
    for name, version in (("numpy", "1.26.4"), ("nvidia-pytriton", "0.7.0"), ("pip", "25.0")):
        write_wheel(tmp_path / "wheels", name, version)
    variables = {
        "UV_PYTHON_DOWNLOADS_JSON_URL": str(mirror),
        "UV_PYTHON_INSTALL_DIR": str(tmp_path / "pythons"),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_DEFAULT_INDEX": (tmp_path / "empty index").as_uri(),
        "UV_FIND_LINKS": str(tmp_path / "wheels"),
        "GATEWAY_EMBEDDED_VENV": "models-environment",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("app.observability.log.configure_logging", lambda level, style: None)  # keeps pytest's logging
    monkeypatch.setattr(launch_module, "candidates", lambda *_: [Path("/nonexistent")])
    monkeypatch.setattr(launch_module.Interpreter, "runs_models", property(lambda each: tmp_path in each.path.parents))
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def write_wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.mark.usefixtures("machine")
def test_init_creates_the_environment_with_a_python_that_uv_installs(tmp_path: Path) -> None:
    assert cli.main(["init", "models"]) == 0
    made = python_of_models(tmp_path / "models-environment")
    assert made.version in {(3, 11), (3, 12)}
    assert made.path.resolve().is_relative_to(tmp_path / "pythons")


@pytest.mark.usefixtures("machine")
def test_packages_of_a_repository_are_installed_and_others_stay(tmp_path: Path) -> None:
    """Also a second time. A package that is nowhere, and a numpy that the backend misreads, are refused."""
    venv, models = tmp_path / "models-environment", tmp_path / "models"
    assert cli.main(["init", str(models)]) == 0
    install_requirements(venv, models)  # which names none
    write_wheel(tmp_path / "wheels", "mine", "1.0")
    write_wheel(tmp_path / "wheels", "numpy", "2.1.0")
    (models / "requirements.txt").write_text("mine\n")
    for _ in range(2):
        install_requirements(venv, models)
        assert {"mine-1.0.dist-info", "nvidia_pytriton-0.7.0.dist-info"} <= {
            path.name for path in venv.glob("lib/python3.*/site-packages/*")
        }
    for wrong, text in (("nowhere", "nowhere"), ("numpy>=2", "unsatisfiable")):
        (models / "requirements.txt").write_text(wrong)
        with pytest.raises(EmbeddedTritonError, match=rf"(?s)models/requirements\.txt could not be installed.*{text}"):
            install_requirements(venv, models)


def test_a_forbidden_download_is_one_message(
    machine: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    machine.setenv("UV_PYTHON_DOWNLOADS", "never")
    assert cli.main(["init", "models"]) == 2
    message = capfd.readouterr().err
    assert "No Python on this machine can run the models: they need Python 3.10 to 3.12" in message
    assert "Python downloads are set to 'never'" in message
    assert not (tmp_path / "models-environment").exists()
    assert (tmp_path / "models" / "gateway.yaml").exists()


def test_an_incomplete_environment_is_removed(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wheels" / "numpy-1.26.4-py3-none-any.whl").unlink()
    with pytest.raises(EmbeddedTritonError, match="numpy"):
        launch_module.create_environment(tmp_path / "models-environment")
    assert not (tmp_path / "models-environment").exists()


def test_a_gateway_needs_another_environment_if_it_cannot_run_models_and_has_uv_to_create_one(
    monkeypatch: pytest.MonkeyPatch, models_venv: Path, tmp_path: Path
) -> None:
    assert not launch_module.needs_environment(models_venv)
    assert launch_module.needs_environment(tmp_path)
    monkeypatch.setattr(launch_module.sysconfig, "get_path", lambda _: os.devnull)
    assert not launch_module.needs_environment(tmp_path)


LOADED = b"""I1120 13:55:39.635715 7662 model_lifecycle.cc:839] "successfully loaded 'ident'"\n"""
FAILED = (
    b"""E1120 13:55:49.076815 7740 model_lifecycle.cc:642] "failed to load 'bad' version 1: """
    b"""Internal: ValueError: weights are missing\\n\\nAt:\\n  /models/bad/1/model.py(5): initialize\\n"\n"""
)
NOT_POLLED = (
    b"""E1120 13:55:49.076815 7740 model_repository_manager.cc:1460] """
    b""""Poll failed for model directory 'broken': ensemble input 'X' for ensemble X' is not used"\n"""
)
NOISE = b"""E1120 13:55:48.693759 7740 server.cc:241] "CudaDriverHelper has not been initialized."\n"""
IN_USE = b"""E1120 13:55:48.693759 7740 main.cc:244] "failed to start GRPC service: Unavailable - already in use"\n"""


def log_of(*pieces):
    log = TritonLog()
    for piece in pieces:
        log.feed(piece)
    return log


def test_loaded_models_are_found_in_split_output():
    assert log_of(LOADED[:30], LOADED[30:] + LOADED[:7]).loaded == ["ident"]


@pytest.mark.parametrize(
    ("pieces", "explanation"),
    [
        (
            [NOISE, FAILED, NOT_POLLED, IN_USE],
            "model 'bad': Internal: ValueError: weights are missing\n\nAt:\n  /models/bad/1/model.py(5): initialize\n"
            "model 'broken': ensemble input 'X' for ensemble X' is not used",
        ),
        ([NOISE, LOADED, IN_USE], IN_USE.decode().strip()),
        ([LOADED], LOADED.decode().strip()),
        ([], "it wrote no log"),
    ],
    ids=["failed models", "without harmless errors", "without errors the last lines", "nothing"],
)
def test_the_explanation_of_a_failed_start(pieces, explanation):
    assert log_of(*pieces).explanation() == explanation


def test_an_endless_line_is_cut(caplog):
    caplog.set_level(logging.DEBUG)
    log = TritonLog()
    for _ in range(64):
        log.feed(b"x" * 1024)
    assert 0 < len(log.explanation()) < 128 * 1024
    assert max(len(each.message) for each in caplog.records) < 17 * 1024


CRASH = (
    b"malloc(): unaligned fastbin chunk detected\nSignal (6) received.\n 0# 0x000055D0 in tritonserver\n"
    b"terminate called after throwing an instance of 'boost::interprocess::lock_exception'\n"
)


@pytest.mark.parametrize(
    "line",
    [
        "free(): invalid pointer",
        "double free or corruption (fasttop)",
        "corrupted size vs. prev_size",
        "corrupted double-linked list",
        "*** stack smashing detected ***: terminated",
        "Fatal glibc error: pthread_mutex_lock.c:450 (__pthread_mutex_lock_full): assertion failed: e != ESRCH",
        "tritonserver: pthread_mutex_lock.c:81: __pthread_mutex_lock: Assertion `mutex->__data.__owner == 0' failed.",
        "terminate called without an active exception",
        "pure virtual method called",
        "Signal (11) received.",
    ],
)
def test_these_lines_announce_a_crash(line):
    assert log_of(f"{line}\n".encode()).death == line


@pytest.mark.parametrize(
    ("text", "death", "levels"),
    [
        (NOISE + LOADED + FAILED, "", ["DEBUG", "ERROR"]),
        (LOADED + CRASH, "malloc(): unaligned fastbin chunk detected", ["DEBUG", "ERROR", "ERROR", "WARNING", "ERROR"]),
        (b"a model's own words\n", "", ["WARNING"]),
        (b"Signal (15) received.\n", "", ["DEBUG"]),
        (b"I1120 13:55:39.635715 7662 server.cc:674] \n+----+\n| Model |\n+----+\n\n", "", ["DEBUG"] * 4),
        (NOISE + b'E1120 13:55:48.693759 7740 a.cc:1] "broken"\nwords\n', "", ["ERROR", "WARNING"]),
    ],
    ids=["errors", "crash without prefixes", "model", "stop", "table", "after an error"],
)
def test_a_line_has_the_level_of_its_meaning_and_a_harmless_one_is_not_logged(caplog, text, death, levels):
    caplog.set_level(logging.DEBUG)
    assert log_of(text).death == death
    lines = [line.rstrip() for line in text.removeprefix(NOISE).decode().splitlines() if line]
    assert [(each.levelname, each.message) for each in caplog.records] == [
        (level, f"triton: {line}") for level, line in zip(levels, lines, strict=True)
    ]


DEBIAN_12 = Machine(system="Linux", architecture="x86_64", glibc=(2, 36), has_glibcxx=True)


@pytest.mark.parametrize(
    ("facts", "messages"),
    [
        ({}, []),
        ({"architecture": "aarch64", "glibc": (2, 35)}, []),
        ({"system": "Darwin"}, [["needs Linux", "Darwin", "--triton HOST:PORT"]]),
        ({"architecture": "riscv64"}, [["x86_64 or aarch64", "riscv64", "--triton HOST:PORT"]]),
        ({"glibc": (2, 31)}, [["glibc 2.35 or newer", "glibc 2.31", "Debian 12"]]),
        ({"glibc": None}, [["glibc 2.35 or newer", "another C library"]]),
        ({"has_glibcxx": False}, [["GLIBCXX_3.4.30", "apt-get install libstdc++6"]]),
        ({"glibc": (2, 31), "has_glibcxx": False}, [["glibc 2.35 or newer"], ["GLIBCXX_3.4.30"]]),
    ],
)
def test_each_missing_requirement_has_a_message_with_a_remedy(facts, messages):
    for message, expected in zip(refusals(replace(DEBIAN_12, **facts)), messages, strict=True):
        assert all(word in message for word in expected)


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


def test_the_first_suitable_interpreter_is_chosen(monkeypatch):
    answers = {
        Path("a"): None,
        Path("b"): interpreter((3, 13)),
        Path("c"): interpreter((3, 11)),
        Path("d"): interpreter((3, 12)),
    }
    monkeypatch.setattr("app.launcher.machine.inspect", answers.get)
    assert choose(answers) == answers[Path("c")]
    assert choose(answers, lambda found: found.version > (3, 12)) == answers[Path("b")]
    assert choose([Path("a")]) is None


def test_candidates_are_the_current_python_path_and_pyenv_each_once(tmp_path):
    on_path = tmp_path / "bin" / "python3.12"
    by_pyenv = tmp_path / "pyenv" / "versions" / "3.10.13" / "bin" / "python3"
    for each in (on_path, by_pyenv):
        each.parent.mkdir(parents=True)
        each.touch(mode=0o755)
    environment = {"PATH": str(on_path.parent), "PYENV_ROOT": str(tmp_path / "pyenv")}
    current = Path(sys._base_executable)
    assert candidates(NAMES, environment) == [current, on_path, by_pyenv]
    found = candidates(("python3",), environment | {"PATH": str(current.parent)})
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("path", "version"), [(sys.executable, sys.version_info[:2]), ("/nonexistent/python3", None), ("/bin/false", None)]
)
def test_inspect_returns_the_version_and_nothing_for_another_program(path, version):
    found = inspect(Path(path))
    assert (found and found.version) == version
