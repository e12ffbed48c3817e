import logging

import pytest

from app.launcher.process import TritonLog

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


def test_failed_models_are_the_explanation():
    explanation = log_of(NOISE, FAILED, NOT_POLLED, IN_USE).explanation()
    assert explanation.startswith("model 'bad': Internal: ValueError: weights are missing\n\nAt:")
    assert explanation.endswith("model 'broken': ensemble input 'X' for ensemble X' is not used")


def test_harmless_errors_are_not_in_the_explanation():
    assert log_of(NOISE, LOADED, IN_USE).explanation() == IN_USE.decode().strip()


def test_without_errors_the_last_lines_are_the_explanation():
    assert log_of(LOADED).explanation() == LOADED.decode().strip()
    assert log_of().explanation() == "it wrote no log"


def test_errors_are_logged_as_errors_and_other_lines_as_debug(caplog):
    caplog.set_level(logging.DEBUG)
    log_of(NOISE, LOADED, FAILED)
    assert [(each.levelname, "weights" in each.message) for each in caplog.records] == [
        ("DEBUG", False),
        ("ERROR", True),
    ]


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


def test_a_crash_is_logged_although_its_lines_have_no_prefix(caplog):
    caplog.set_level(logging.DEBUG)
    log = log_of(LOADED, CRASH)
    assert log.death == "malloc(): unaligned fastbin chunk detected"
    assert [each.levelname for each in caplog.records] == ["DEBUG", "ERROR", "ERROR", "WARNING", "ERROR"]


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
    ("text", "levels"),
    [
        (b"a model's own words\n", ["WARNING"]),
        (b"Signal (15) received.\n", ["DEBUG"]),
        (b"I1120 13:55:39.635715 7662 server.cc:674] \n+----+\n| Model |\n+----+\n\n", ["DEBUG"] * 4),
        (NOISE + b'E1120 13:55:48.693759 7740 a.cc:1] "broken"\nwords\n', ["ERROR", "WARNING"]),
    ],
    ids=["model", "stop", "table", "after an error"],
)
def test_other_lines_without_prefix_announce_nothing(caplog, text, levels):
    caplog.set_level(logging.DEBUG)
    assert log_of(text).death == ""
    assert [each.levelname for each in caplog.records] == levels
