"""Tries the commands of README in a new Debian: `make run`, `pip install` with `init`, and tests. As root, on Linux.

    python3 deploy/fresh_debian.py trixie

Suites are debootstrap's: bookworm, trixie, testing. The system and a clone of the last commit are in `.cache/debian`.
An ordinary user without other software runs the commands, `make run` and the tests without a network except loopback.
`--whole` runs all of `make test` instead of the parts in TESTS. If no Python of the system fits the models, uv installs
the one that this machine has (python_mirror.py), because its own address may not be reachable.

pip and uv have the settings of this machine: the variables PIP_*, UV_* and those of proxies and certificates, and
/etc/pip.conf. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Of this checkout, which may not be installed.
from app.launcher import machine  # noqa: E402
from deploy.python_mirror import write_mirror  # noqa: E402

PACKAGES = "ca-certificates,curl,make,python3-venv"
HOME = "/home/user"
CHECKOUT = f"{HOME}/triton gateway"
MIRROR = "/srv/python"
INHERITED = ("PIP_", "UV_", "SSL_CERT_", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
TESTS = "tests/core tests/pipelines tests/triton tests/process tests/test_cli.py"
# The new system has its own processes, shared memory and mounts. They end with the command.
SANDBOX = """
mount -t proc proc "$ROOT/proc" && mount --rbind /dev "$ROOT/dev" && mount -t tmpfs tmpfs "$ROOT/dev/shm" || exit 125
[ "$NETWORK" = yes ] || ip link set lo up || exit 125
exec chroot --userspec=1000:1000 "$ROOT" "$@"
"""
# Starts a command, sends the requests, and ends the command as Ctrl-C does. `set -m` gives it a process group.
READY = """
wait_until_ready() {
    for _ in $(seq 120); do
        curl -sf http://127.0.0.1:8081/health/ready >ready.log && return
        kill -0 "$started" || break
        sleep 1
    done
    cat run.log; exit 1
}
end() {
    kill -INT -- "-$started"; wait "$started"; status=$?
    [ "$status" -eq 0 ] || [ "$status" -eq 130 ]  # make ends with 130 after Ctrl-C
}
"""
RUN = f"""{READY}
make run >run.log 2>&1 & started=$!
wait_until_ready
curl -sS http://127.0.0.1:8080/v1/pipelines/ocr -F image=@samples/sign.png | grep "Hello Triton gateway" || exit 1
curl -sS -i http://127.0.0.1:8080/v1/pipelines/ocr -F image=@samples/blank.png | grep "x-early-exit: no_text" || exit 1
end
"""
INSTALL = """
python3 -m venv ../installed && ../installed/bin/pip install --quiet '.[embedded]' && cd .. &&
installed/bin/triton-gateway init 'my models'
"""
RUN_INSTALLED = f"""{READY}
cd .. && installed/bin/triton-gateway serve --embedded --models 'my models' >run.log 2>&1 & started=$!
cd .. && wait_until_ready
curl -sS http://127.0.0.1:8080/v1/pipelines/report --json '{{"text": "Hello gateway"}}' | grep gateway || exit 1
end
"""


class Debian:
    """A system in `root`, made by debootstrap."""

    def __init__(self, suite: str) -> None:
        self.suite = suite
        self.root = ROOT / ".cache" / "debian" / suite
        self.environment = {name: value for name, value in os.environ.items() if name.upper().startswith(INHERITED)}

    def install(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", self.suite, str(self.root)],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        for path in filter(os.path.exists, FILES):
            shutil.copyfile(path, f"{self.root}{path}")
        checkout = Path(f"{self.root}{CHECKOUT}")
        # git refuses to read a checkout of another user, unless it is told that the checkout is safe.
        safe = Path(f"{self.root}{HOME}.gitconfig")
        safe.write_text("[safe]\ndirectory = *\n")
        clone = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(checkout)]
        subprocess.run(clone, env={**os.environ, "GIT_CONFIG_GLOBAL": str(safe)}, check=True)
        subprocess.run(["chown", "-R", "1000:1000", f"{self.root}{HOME}"], check=True)

    def add_mirror(self) -> None:
        """Makes the Python of this machine the only one that uv can install."""
        candidates = [Path(f"/usr/bin/python3.{minor}") for minor in (12, 11)]
        python = machine.choose(candidates)
        if python is None:
            raise SystemExit("This machine has no /usr/bin/python3.11 or 3.12 with a shared libpython.")
        write_mirror(python.path, Path(f"{self.root}{MIRROR}"), f"file://{MIRROR}")
        self.environment["UV_PYTHON_DOWNLOADS_JSON_URL"] = f"file://{MIRROR}/downloads.json"

    def run(self, command: str, *, network: bool = False, **environment: str) -> int:
        """Runs a command of the shell in the checkout, as the user. Returns the status."""
        inner = {"HOME": HOME, "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}
        words = [f"{name}={value}" for name, value in (inner | self.environment | environment).items()]
        return subprocess.run(
            [
                *("unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", *([] if network else ["--net"])),
                *("sh", "-c", SANDBOX, "sandbox"),
                *("/usr/bin/env", "-i", f"--chdir={CHECKOUT}", *words, "bash", "-c", f"set -m; {command}"),
            ],
            env={**os.environ, "ROOT": str(self.root), "NETWORK": "yes" if network else "no"},
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


def try_commands(suite: str, tests: str) -> bool:
    """Prints the output, status and time of each step. Returns whether all succeeded."""
    debian = Debian(suite)
    succeeded = [
        timed("debootstrap", debian.install),
        # Where no Python fits the models, this prints the message for a machine that must not download one.
        timed(
            "make setup without downloads",
            lambda: debian.run("make setup; true", network=True, UV_PYTHON_DOWNLOADS="never"),
        ),
        timed("mirror", debian.add_mirror),
        timed("make setup", lambda: debian.run("make setup && ls -l .cache/python", network=True)),
        timed("make run", lambda: debian.run(RUN)),
        timed("pip install and init", lambda: debian.run(INSTALL, network=True)),
        timed("serve --embedded", lambda: debian.run(RUN_INSTALLED)),
        timed("make tools", lambda: debian.run("make tools", network=True)),
        timed("tests", lambda: debian.run(tests)),
    ]
    return all(succeeded)


def timed(name: str, step: Callable[[], int | None]) -> bool:
    begun = time.monotonic()
    status = step() or 0
    sys.stdout.write(f"== {name}: status {status} after {time.monotonic() - begun:.0f} s\n")
    sys.stdout.flush()
    return status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Try the commands of README in a new Debian.")
    parser.add_argument("suite", help="bookworm, trixie, testing")
    parser.add_argument("--whole", action="store_true", help="run all of `make test`")
    given = parser.parse_args()
    tests = "make test" if given.whole else f".venv/bin/python -m pytest -q -m 'not full' {TESTS}"
    sys.exit(not try_commands(given.suite, tests))


if __name__ == "__main__":
    main()
