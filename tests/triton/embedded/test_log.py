import logging

from app.triton.embedded.log import TritonLog

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
