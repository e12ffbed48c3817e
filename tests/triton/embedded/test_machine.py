from dataclasses import replace

import pytest

from app.triton.embedded.machine import Machine, refusals

DEBIAN_12 = Machine(system="Linux", architecture="x86_64", glibc=(2, 36), has_glibcxx=True)


@pytest.mark.parametrize("machine", [DEBIAN_12, replace(DEBIAN_12, architecture="aarch64", glibc=(2, 35))])
def test_fit_machine_is_not_refused(machine):
    assert refusals(machine) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"system": "Darwin"}, ["needs Linux", "Darwin", "--triton HOST:PORT"]),
        ({"architecture": "riscv64"}, ["x86_64 or aarch64", "riscv64", "--triton HOST:PORT"]),
        ({"glibc": (2, 31)}, ["glibc 2.35 or newer", "glibc 2.31", "Debian 12"]),
        ({"glibc": None}, ["glibc 2.35 or newer", "another C library"]),
        ({"has_glibcxx": False}, ["GLIBCXX_3.4.30", "apt-get install libstdc++6"]),
    ],
)
def test_each_lack_is_one_message_with_the_way_out(facts, words):
    (message,) = refusals(replace(DEBIAN_12, **facts))
    assert all(word in message for word in words)


def test_every_lack_is_named_at_once():
    assert len(refusals(replace(DEBIAN_12, glibc=(2, 31), has_glibcxx=False))) == 2


def test_the_machine_of_this_test_tells_its_facts():
    here = Machine.here()
    assert here.system
    assert here.architecture
