"""The gateway accepts a signed marker only for its own request."""

import pytest
from model_kit.outcomes import EarlyExit
from model_kit.signed_exit import key_of, signed_exit

from app.core.errors import UpstreamError
from app.pipelines.model_errors import EarlyExitRules
from app.pipelines.spec import EarlyExitRule, ErrorMatch

KEY = b"a key of sixteen bytes or more"


def reason(message, request_id="r1", key=KEY):
    rule = EarlyExitRule(reason="no_text", error=ErrorMatch(code="any", signed=True))
    return EarlyExitRules((rule,), frozenset({"ocr"}), key).reason_of_error(UpstreamError(None, message), request_id)


def test_a_signed_exit_is_accepted_from_an_ensemble():
    marker = str(signed_exit("decide", "no_text", "r1", KEY))
    assert reason(marker) == reason(f"in ensemble 'ocr', {marker}") == "no_text"


def test_a_marker_with_a_wrong_signature_is_rejected():
    """That of another request, of another reason and of another key."""
    assert reason(str(signed_exit("decide", "no_text", "r2", KEY))) is None
    assert reason(str(signed_exit("decide", "no_face", "r1", KEY))) is None
    assert reason(str(signed_exit("decide", "no_text", "r1", b"another key of sixteen bytes"))) is None


def test_a_signed_exit_is_an_early_exit():
    exit_ = signed_exit("decide", "no_text", "r1", KEY)
    assert type(exit_) is EarlyExit
    assert exit_.reason == "no_text"


def test_the_key_is_read_from_the_environment_of_triton():
    assert key_of({"EARLY_EXIT_KEY": "ä" * 8}) == ("ä" * 8).encode()


@pytest.mark.parametrize("environment", [{}, {"EARLY_EXIT_KEY": ""}])
def test_a_model_without_the_key_names_the_missing_variable(environment):
    with pytest.raises(RuntimeError, match=r"EARLY_EXIT_KEY is not set.*GATEWAY_EARLY_EXIT_KEY"):
        key_of(environment)
