"""The commands of README in a fresh Debian 12, 13 and testing. Needs root, about ten minutes for each."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Require

ADVICE = [
    ("bookworm", "To install one: `apt-get install python3.11 libpython3.11`, or with pyenv"),
    ("trixie", "To install one: with pyenv"),
    ("testing", "To install one: with pyenv"),
]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("suite", "advice"), ADVICE)
def test_the_commands_of_the_readme_work(
    suite: str, advice: str, require: Require, pytestconfig: pytest.Config
) -> None:
    require(os.geteuid() == 0, "debootstrap and chroot need root")
    require(shutil.which("debootstrap"), "there is no debootstrap: `make system-packages` installs it")
    script = Path("deploy/fresh_debian.py")
    done = subprocess.run(
        [sys.executable, script, suite], cwd=pytestconfig.rootpath, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert advice in done.stdout
    assert "The setup does not install one, because UV_PYTHON_DOWNLOADS=never is set." in done.stdout
