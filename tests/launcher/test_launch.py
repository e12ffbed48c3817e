from dataclasses import replace
from pathlib import Path

import pytest

from app.launcher.interpreter import Interpreter
from app.launcher.launch import EmbeddedOptions, Launch, Ports, ServedRepository, every_folder
from app.launcher.machine import RepositoryUnservable
from app.launcher.models_venv import ModelEnvironment

MODELS = ModelEnvironment(Interpreter(Path("/venv/bin/python3"), (3, 11), "/opt/python/lib"), Path("/wheel"))


@pytest.fixture
def launch():
    def launch(is_complete=True, **inherited):
        options = EmbeddedOptions(Path("/models"), Path("/venv"), environment=inherited)
        repository = ServedRepository(Path("/models"), ("ident",), is_complete)
        return Launch(options, Ports(1, 2, 3), repository, MODELS, "0123", Path("/tmp/folder"))

    return launch


def test_the_server_listens_on_loopback_only(launch):
    addresses = {each for each in launch().command() if "-address" in each}
    assert addresses == {f"--{service}-address=127.0.0.1" for service in ("grpc", "http", "metrics")}


def test_the_server_and_its_shared_memory_have_a_unique_name(launch):
    command = launch().command()
    assert "--id=0123" in command
    assert "--backend-config=python,shm-region-prefix-name=triton_gateway_0123_" in command


def test_the_server_allows_frequent_pings(launch):
    assert "--grpc-http2-max-ping-strikes=0" in launch().command()


@pytest.mark.parametrize("is_complete", [True, False])
def test_auto_completion_is_off_only_for_complete_configs(launch, is_complete):
    assert ("--disable-auto-complete-config" in launch(is_complete).command()) is is_complete


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


def test_without_a_reader_every_folder_is_a_model_that_triton_completes(tmp_path):
    with pytest.raises(RepositoryUnservable):
        every_folder(tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "a").mkdir()
    assert every_folder(tmp_path) == ServedRepository(tmp_path.resolve(), ("a", "b"), is_complete=False)
