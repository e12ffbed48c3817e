from dataclasses import replace

import pytest

from app.launcher.machine import Machine, refusals

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
