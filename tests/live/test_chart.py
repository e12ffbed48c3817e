"""What the chart runs: the command of Triton's container as process 1, until its end in each phase, and `helm test`."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from app.launcher.launch import link_backends, python_of_models
from app.shared_memory.regions import PREFIX
from tests.conftest import Require
from tests.helm.rendering import CHART, environment_of, render, the, triton_container
from tests.toolkit.processes import LIVE, GatewayProcess
from tests.toolkit.programs import output_of
from tests.toolkit.waiting import eventually

EXIT_S = 6
"""``shutdown.tritonExitSeconds``, longer than a stream of these tests."""
KILLED_S = 20.0
"""The container must end within this time: Triton's exit time, and the time until SIGKILL."""
LOAD_S = 60
"""The time to load the slow model, longer than every limit of these tests."""
SHM_MIB, INSTANCES, KILLS = 12, 5, 2
"""Two Tritons with this many processes do not fit: each process takes 1 MiB of `/dev/shm`, and Triton itself more."""
OUTPUTS = 15
BODY = json.dumps({"SCRIPT": json.dumps({"outputs": OUTPUTS, "interval_s": 0.2, "items": [1, 2]})})
HTTP = "http://127.0.0.1:8000/v2"
DEMO = CHART / "ci" / "cpu-demo-values.yaml"
SLOW = f"""
import time
class TritonPythonModel:
    def initialize(self, args):
        time.sleep({LOAD_S})
"""
BROKEN = "raise RuntimeError('cannot be imported')"
ENTRY_POINT = """#!/bin/bash
echo "entry point begins"
sleep "${ENTRY_S:-0}"
echo "entry point ends"
exec "$@"
"""
SETUP = """
ip link set lo up
mount -t tmpfs tmpfs /dev/shm
mkdir /dev/shm/upper /dev/shm/work
mount -t overlay overlay -o lowerdir=/opt,upperdir=/dev/shm/upper,workdir=/dev/shm/work /opt
mkdir -p /opt/nvidia
cp "$1/entry.sh" /opt/nvidia/nvidia_entrypoint.sh
mkdir /opt/shared
mount --rbind "$1" /opt/shared
mount -t tmpfs tmpfs /tmp
if [ -d /opt/shared/shm ]; then
  mount --bind /opt/shared/shm /dev/shm
  mount --bind /opt/shared/tmp /tmp
fi
mount -o remount,bind,ro /
shift
exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""
"""A container's network, folders, read-only root and capabilities, and the entry point of NVIDIA's image.

The folders `shm` and `tmp` of the test, if there, are the pod's volumes, which outlive the container.
"""
NAMESPACES = ("--pid", "--net", "--mount", "--ipc", "--fork", "--mount-proc")


@dataclass(frozen=True)
class Container:
    """A running container. ``process``: the `unshare` outside it; ``init``: its process 1, by the number outside."""

    process: subprocess.Popen[bytes]
    init: int
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def command(self, *words: str) -> list[str]:
        """Returns a command line that runs in the network of the container."""
        return ["nsenter", f"--target={self.init}", "--net", *words]

    @property
    def is_live(self) -> bool:
        """What the rendered probe of the container says."""
        probe = triton_container(render(DEMO))["livenessProbe"]["exec"]["command"]
        words = self.command("--pid", "--mount", *probe)
        return subprocess.run(words, check=False, capture_output=True).returncode == 0

    @property
    def triton(self) -> int:
        """The number of Triton's process outside the container."""
        processes = [self.init, *children(self.init)]
        return next(pid for pid in processes if Path(f"/proc/{pid}/comm").read_text() == "tritonserver\n")

    def status_after(self, *numbers: int) -> int:
        """Sends signals to process 1, half a second apart, and returns the container's exit status."""
        for number in numbers:
            os.kill(self.init, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.5)
        return self.process.wait(KILLED_S)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


Start = Callable[..., Container]


@pytest.fixture
def start(tmp_path: Path, models_venv: Path, require: Require) -> Iterator[Start]:
    """Starts the command of a rendered container: ``start(command, models, NAME=value)``."""
    require(os.geteuid() == 0, "namespaces of a container need root")
    programs = ("unshare", "nsenter", "setpriv", "ip", "curl", "bash")
    require(all(map(shutil.which, programs)), f"one of {', '.join(programs)} is not installed")
    python = python_of_models(models_venv)
    link_backends(python, tmp_path / "backends")
    entry = tmp_path / "entry.sh"
    entry.write_text(ENTRY_POINT)
    entry.chmod(0o755)
    running: list[Container] = []

    def start(command: list[str], **variables: str) -> Container:
        path = [f"{python.server}/bin", str(models_venv / "bin"), os.environ["PATH"]]
        libraries = python.library_folder or ""
        variables |= {"PATH": ":".join(path), "LD_LIBRARY_PATH": libraries, "PYTHONDONTWRITEBYTECODE": "1"}
        log_path = tmp_path / "log"
        with log_path.open("wb") as log:
            words = ["unshare", *NAMESPACES, "sh", "-ec", SETUP, "setup", str(tmp_path), *command]
            process = subprocess.Popen(words, env=os.environ | variables, stdout=log, stderr=log)
        eventually(lambda: bool(children(process.pid)))
        container = Container(process, children(process.pid)[0], log_path)
        running.append(container)
        return container

    yield start
    for container in running:
        if container.process.poll() is None:
            os.kill(container.init, signal.SIGKILL)
            container.process.wait(KILLED_S)


def sidecar(folder: Path, exit_s: int = EXIT_S, **scripts: str) -> list[str]:
    """Creates a repository with a model that streams. ``scripts``: of further models, by name.

    Returns the command line of the rendered chart. Its values are those of the first install, and say where the models
    and the Python backend are.
    """
    for name in ("scripted_stream", *scripts):
        model = shutil.copytree(LIVE / "models" / "scripted_stream", folder / "models" / name)
        config = (model / "config.pbtxt").read_text()
        (model / "config.pbtxt").write_text(config.replace('name: "scripted_stream"', f'name: "{name}"'))
        if name in scripts:
            (model / "1" / "model.py").write_text(scripts[name])
    values = yaml.safe_load(DEMO.read_text())
    backends = "--backend-directory=/opt/shared/backends"
    values["triton"] |= {"models": {"path": "/opt/shared/models"}, "extraArgs": [backends]}
    container = triton_container(render(values | {"shutdown": {"tritonExitSeconds": exit_s}}))
    return [*container["command"], *container["args"]]


def loaded(container: Container) -> Container:
    eventually(lambda: container.is_live or container.process.poll() is not None)
    assert container.process.poll() is None, container.log[-2000:]
    return container


@pytest.mark.parametrize(
    ("is_slow", "phase"), [(False, "entry point begins"), (True, "successfully loaded 'scripted_stream'")]
)
def test_triton_ends_before_it_is_live(start: Start, tmp_path: Path, is_slow: bool, phase: str) -> None:
    """While the entry point runs, and while the slow model loads."""
    container = start(sidecar(tmp_path, **({"slow": SLOW} if is_slow else {})), ENTRY_S="0" if is_slow else str(LOAD_S))
    eventually(lambda: phase in container.log)
    assert not container.is_live
    assert container.status_after(signal.SIGTERM) == 128 + signal.SIGTERM
    assert ("entry point ends" in container.log) is is_slow


def test_streams_end_in_order_after_two_signals(start: Start, tmp_path: Path) -> None:
    """Triton starts although one of its models cannot be imported."""
    container = loaded(start(sidecar(tmp_path, broken=BROKEN)))
    assert "entry point ends" in container.log
    index = output_of(container.command("curl", "--silent", "--request", "POST", f"{HTTP}/repository/index"))
    assert {each["name"]: each["state"] for each in json.loads(index)} == {
        "scripted_stream": "READY",
        "broken": "UNAVAILABLE",
    }
    words = container.command("curl", "--silent", "--data", BODY, f"{HTTP}/models/scripted_stream/generate_stream")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        first = client.stdout.readline()
        assert container.status_after(signal.SIGTERM, signal.SIGTERM) == 0
        events = [line for line in [first, *client.stdout] if line.startswith("data: ")]
    assert len(events) == OUTPUTS


def test_a_triton_that_hangs_is_killed(start: Start, tmp_path: Path) -> None:
    container = loaded(start(sidecar(tmp_path, exit_s=1)))
    os.kill(container.triton, signal.SIGSTOP)
    assert container.status_after(signal.SIGTERM) == 128 + signal.SIGKILL


def test_the_entry_point_is_optional(start: Start) -> None:
    words = triton_container(render({"triton": {"entryPoint": ""}}))["command"]
    for shell in ("sh", "bash"):
        container = start([shell, *words[1:], "sh", "-c", "exit 7"])
        assert container.process.wait(KILLED_S) == 7, shell
        assert "entry point" not in container.log, shell


def test_kubernetes_expands_nothing_in_the_script() -> None:
    script = (CHART / "files" / "triton_init.sh").read_text()
    assert "$(" not in script
    assert "$$" not in script


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[Path]:
    """Mounts a small `/dev/shm` of a pod, as root. Returns the folder of the volumes `shm` and `tmp`."""
    for name in ("shm", "tmp"):
        (tmp_path / name).mkdir()
    size = f"size={SHM_MIB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(tmp_path / "shm")], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path / "shm")], check=True)


def test_a_killed_triton_leaves_nothing_to_the_next_one(start: Start, volumes: Path) -> None:
    """Each start has the whole `/dev/shm`, without the regions of the gateway and the folders of others."""
    command = sidecar(volumes)
    config = volumes / "models" / "scripted_stream" / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", f"count: {INSTANCES}"))
    kept = [volumes / "shm" / f"{PREFIX}0_1", volumes / "shm" / f"{PREFIX}0.lock", volumes / "tmp" / "folder_of_user"]
    for path in kept:
        path.touch()
    (volumes / "shm" / "folder").mkdir()
    used: list[int] = []
    for name in ("folderabc123", "python_env_abc123"):
        (volumes / "tmp" / name / "1").mkdir(parents=True)
    for _ in range(KILLS):
        container = loaded(start(command))
        assert "successfully loaded 'scripted_stream'" in container.log, container.log[-2000:]
        os.kill(container.triton, signal.SIGKILL)
        assert container.process.wait(KILLED_S) == 128 + signal.SIGKILL
        used.append(len(list((volumes / "shm").iterdir())))
    own = [count - len(kept) for count in used]  # of the folder and the two files that stay, and the regions
    assert max(own) < 2 * min(own), used
    assert used[0] > INSTANCES
    assert all(path.exists() for path in kept)
    assert not list((volumes / "tmp").glob("folderabc123"))
    assert len(list((volumes / "tmp").glob("python_env_*"))) <= 1


def smoke_test(gateway: GatewayProcess, **tests: str) -> subprocess.CompletedProcess[str]:
    """Runs the command of the test pod with its variables, but with the address of ``gateway``."""
    (container,) = the(render({"tests": tests}), "Pod")["spec"]["containers"]
    environment = os.environ | environment_of(container) | {"URL": gateway.url, "WAIT_S": "5"}
    command = [sys.executable, *container["command"][1:]]
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)


def test_helm_test_calls_the_configured_pipeline_of_a_gateway_that_is_ready(gateway: GatewayProcess) -> None:
    done = smoke_test(gateway)
    assert (done.returncode, done.stdout) == (0, f"{gateway.url} is ready\n")
    done = smoke_test(gateway, pipeline="write", body='{"prompt": "The", "max_tokens": 4, "seed": 7}')
    assert done.returncode == 0, done.stderr
    assert '"finish_reason"' in done.stdout
    done = smoke_test(gateway, pipeline="nothing")
    assert done.returncode == 1
    assert "unknown_pipeline" in done.stderr
    (container,) = the(render(DEMO), "Pod")["spec"]["containers"]
    demo = environment_of(container)
    assert smoke_test(gateway, pipeline=demo["PIPELINE"], body=demo["BODY"]).returncode == 0
