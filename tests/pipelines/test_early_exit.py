"""An error is an early exit only by the pipeline's rules and its whole message, never because of a user's text.

In these tests an attacker controls text in a model's error and knows the rules, the markers, all model names and the
ids of other requests. The attacker does not know the gateway's id of this request, or the key.
"""

import hashlib
import hmac
import json
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.errors import UpstreamError
from app.core.inference import new_request_id
from app.pipelines.model_errors import EarlyExitRules
from app.pipelines.spec import EarlyExitRule, ErrorMatch

KEY = b"a key of sixteen bytes or more"
OTHER_KEY = b"another key of sixteen bytes"
RID = "0123456789abcdef0123456789abcdef"
OTHER_RID = "fedcba9876543210fedcba9876543210"
MARKER = "EARLY_EXIT[no_text]"
PATTERN = r"EARLY_EXIT\[no_text\]( page=\d+)?"
ENSEMBLES = frozenset({"ocr", "inner.v2", "with space"})
FOREIGN = ("other", "oc", "ocr2", "", "ocr', ")

EXACT = ErrorMatch(code="ALREADY_EXISTS", message=MARKER)
MATCHED = ErrorMatch(code="ALREADY_EXISTS", message_pattern=PATTERN)
SIGNED = ErrorMatch(code="any", signed=True)


def rules(*matches: ErrorMatch, key: bytes | None = KEY) -> EarlyExitRules:
    return EarlyExitRules(tuple(EarlyExitRule(reason="no_text", error=match) for match in matches), ENSEMBLES, key)


def reason(match: ErrorMatch, message: str, code: str | None = "ALREADY_EXISTS", key: bytes | None = KEY) -> str | None:
    return rules(match, key=key).reason_of_error(UpstreamError(code, message), RID)


def signed(claim: str, key: bytes = KEY) -> str:
    return f"EARLY_EXIT/1 {hmac.new(key, claim.encode(), hashlib.sha256).hexdigest()} {claim}"


def claim(reason: str = "no_text", rid: str = RID) -> str:
    return json.dumps({"reason": reason, "rid": rid, "step": "decide"}, separators=(",", ":"), sort_keys=True)


def in_ensembles(names: Iterable[str]) -> str:
    return "".join(f"in ensemble '{name}', " for name in names)


def anywhere(pattern: str) -> ErrorMatch:
    return ErrorMatch(code="any", message_pattern=pattern)


ANCHORED = ["^EXIT$", "EXIT$", r"\AEXIT\Z", "(?m)^EXIT$", "X|EXIT|Y", "EXIT|"]
DIGITS = r"EXIT [0-9]+"
OTHER_CODES = ("INTERNAL", "UNAVAILABLE", "already_exists", "", "any", None)
WITH_CODE = ErrorMatch(code="ALREADY_EXISTS", signed=True)


@pytest.mark.parametrize(
    ("match", "message", "code", "expected"),
    [
        (EXACT, MARKER, "ALREADY_EXISTS", "no_text"),
        (MATCHED, MARKER, "ALREADY_EXISTS", "no_text"),
        (MATCHED, MARKER + " page=12", "ALREADY_EXISTS", "no_text"),
        (SIGNED, signed(claim()), "ALREADY_EXISTS", "no_text"),
        (EXACT, f"[request id: {RID}.detect.12] {MARKER}", "ALREADY_EXISTS", "no_text"),  # of a call of a step
        (SIGNED, f"[request id: {RID}.detect.1] {signed(claim(rid=f'{RID}.detect.1'))}", None, "no_text"),
        *((anywhere(pattern), "EXIT", "ALREADY_EXISTS", "no_text") for pattern in ANCHORED),
        (anywhere(DIGITS), "EXIT 9", "ALREADY_EXISTS", "no_text"),
        # the code must be the declared one; a signature, or code: any, holds without a code
        *((match, MARKER, code, None) for match in (EXACT, MATCHED) for code in OTHER_CODES),
        *(
            (ErrorMatch(code="any", message=MARKER), MARKER, code, "no_text")
            for code in ("INTERNAL", "ALREADY_EXISTS", None)
        ),
        *((WITH_CODE, signed(claim()), code, "no_text") for code in ("ALREADY_EXISTS", None)),
        (WITH_CODE, signed(claim()), "INTERNAL", None),
    ],
)
def test_the_whole_message_and_its_code_are_an_exit(
    match: ErrorMatch, message: str, code: str | None, expected: str | None
) -> None:
    assert reason(match, message, code) == expected


@pytest.mark.parametrize(
    ("found", "message", "expected"),
    [
        (
            [
                ("never", ErrorMatch(code="ABORTED", message=MARKER)),
                ("first", MATCHED),
                ("second", EXACT),
            ],
            MARKER,
            "first",
        ),
        ([("no_text", SIGNED), ("no_face", SIGNED)], signed(claim("no_face")), "no_face"),
        ([], MARKER, None),
    ],
)
def test_the_first_rule_that_holds_wins(
    found: list[tuple[str, ErrorMatch]], message: str, expected: str | None
) -> None:
    several = EarlyExitRules(tuple(EarlyExitRule(reason=name, error=each) for name, each in found), ENSEMBLES, KEY)
    assert several.reason_of_error(UpstreamError("ALREADY_EXISTS", message), RID) == expected


SPOOFS = [
    f"{MARKER}\n",
    f"{MARKER}\r",
    f"{MARKER}\0",
    f"{MARKER} ",
    f" {MARKER}",
    f"\n{MARKER}",
    f"\ufeff{MARKER}",
    f"user said {MARKER}",
    f"{MARKER} said the user",
    f"x\n{MARKER}",
    f"{MARKER}\nx",
    MARKER.lower(),
    MARKER.replace("E", "\u0395", 1),
    MARKER + MARKER,
    f"[request id: {OTHER_RID}] {MARKER}",
    f"[request id: ] {MARKER}",
    f"[request id: {RID}.] {MARKER}",
    f"[request id: {RID}x.detect.1] {MARKER}",
    f"[request id: {RID}.de.tect.1] {MARKER}",
    f"[request id: {RID}]{MARKER}",
    f"[request id: {RID.upper()}] {MARKER}",
    f"[request id: {OTHER_RID}] [request id: {RID}] {MARKER}",
    f"in ensemble 'ocr',{MARKER}",
    f"in ensemble ocr, {MARKER}",
    f"In ensemble 'ocr', {MARKER}",
    f"in ensemble 'ocr', x, {MARKER}",
    *(f"in ensemble '{name}', {MARKER}" for name in FOREIGN),
    *(f"in ensemble 'ocr', in ensemble '{name}', {MARKER}" for name in FOREIGN),
    f"Failed to process the request(s) for model 'm_0_0', message: ValueError: {MARKER}\n\nAt:\n  model.py(1)",
    f"Failed to process the request(s) for model 'm_0_0', message: {MARKER}",
]
UNSIGNED = [
    signed(claim(), OTHER_KEY),
    signed(claim(), b""),
    signed(claim(rid=OTHER_RID)),
    signed(claim(rid="")),
    signed(claim(rid=f"{RID}x.detect.1")),
    signed(claim("no_face")),
    signed("{}"),
    signed('{"reason":"no_text"}'),
    signed('["no_text"]').replace("[", "{").replace("]", "}"),
    signed(claim()) + " ",
    signed(claim()) + "\n",
    "x" + signed(claim()),
    signed(claim()).replace("EARLY_EXIT/1", "EARLY_EXIT/2"),
    signed(claim()).replace("EARLY_EXIT/1", "early_exit/1"),
    signed(claim())[:-1],
    signed(claim()).replace(signed(claim()).split(" ")[1], signed(claim()).split(" ")[1][:63]),
    signed(claim()).replace(signed(claim()).split(" ")[1], signed(claim()).split(" ")[1].upper()),
    signed(claim()).replace(signed(claim()).split(" ")[1], "\u0660" * 64),
    signed(claim()).replace(signed(claim()).split(" ")[1], ""),
    "EARLY_EXIT/1 " + "0" * 64 + " " + claim(),
    "EARLY_EXIT/1 " + hashlib.sha256(KEY + claim().encode()).hexdigest() + " " + claim(),
    signed("{" + " " * 512 + "}"),
    signed(claim() + "}"),
    signed('{"rid":"' + RID + '","reason":"no_text"'),
    MARKER,
]
AROUND = ["EXIT\n", "\nEXIT", "EXIT\nEXIT", "a\nEXIT\nb", "EXIT Y", "XEXIT"]


@pytest.mark.parametrize(
    ("match", "message"),
    [
        *((match, message) for match in (EXACT, MATCHED) for message in SPOOFS),
        *((anywhere(DIGITS), f"EXIT {digit}") for digit in ("\u0663", "\u0967", "\U0001d7d7")),
        *((anywhere(pattern), message) for pattern in ANCHORED for message in AROUND),
        *((SIGNED, prefix + message) for message in UNSIGNED for prefix in ("", "in ensemble 'ocr', ")),
    ],
)
def test_text_around_a_marker_and_a_false_signature_are_not_exits(match: ErrorMatch, message: str) -> None:
    assert reason(match, message) is None


def test_a_marker_needs_the_key_and_its_own_request() -> None:
    assert rules(SIGNED).reason_of_error(UpstreamError(None, signed(claim())), OTHER_RID) is None
    assert reason(SIGNED, signed(claim()), key=None) is None
    assert reason(SIGNED, signed(claim(), b""), key=None) is None


BOTH = (EarlyExitRule(reason="no_y", missing=["Y"]), EarlyExitRule(reason="nothing", empty=["Y", "Z"]))
MISSING = (EarlyExitRule(reason="no", missing=["Y", "Z"]),)


@pytest.mark.parametrize(
    ("found", "written", "empty", "expected"),
    [
        (BOTH, {"Y", "Z"}, set(), None),
        (BOTH, {"Z"}, set(), "no_y"),
        (BOTH, set(), set(), "no_y"),
        (BOTH, {"Y", "Z"}, {"Y"}, None),
        (BOTH, {"Y", "Z"}, {"Y", "Z"}, "nothing"),
        (MISSING, {"Z"}, set(), None),
        (MISSING, {"W"}, set(), "no"),
    ],
)
def test_rules_for_missing_and_empty_outputs(
    found: tuple[EarlyExitRule, ...], written: set[str], empty: set[str], expected: str | None
) -> None:
    assert EarlyExitRules(found, ENSEMBLES).reason_of_outputs(written, empty) == expected


# The parts of an attacker's messages: Triton's texts, the markers, names and ids of other requests, and any text.
PIECES = st.one_of(
    st.sampled_from(
        [
            MARKER,
            MARKER[:-1],
            "EARLY_EXIT/1 ",
            "in ensemble '",
            "', ",
            "in ensemble 'ocr', ",
            "in ensemble 'other', ",
            "[request id: ",
            "] ",
            f"[request id: {OTHER_RID}] ",
            OTHER_RID,
            "\n",
            "\0",
            " page=1",
            " page=\u0663",
            " ",
            "'",
            signed(claim(rid=OTHER_RID)),
            signed(claim(), OTHER_KEY),
            "EARLY_EXIT/1 " + "0" * 64 + " " + claim(rid=OTHER_RID),
        ]
    ),
    st.text(max_size=12),
    st.sampled_from(sorted(ENSEMBLES)),
)
USER_TEXT = st.lists(PIECES, min_size=1, max_size=6).map("".join)
PREFIX = st.tuples(
    st.lists(st.sampled_from(sorted(ENSEMBLES)), max_size=3), st.sampled_from(["", f"[request id: {RID}] "])
).map(lambda parts: in_ensembles(parts[0]) + parts[1])
GENUINE = re.compile(
    r"(?:in ensemble '(?:ocr|inner\.v2|with space)', |\[request id: " + RID + r"\] )*" + PATTERN, re.UNICODE
)


def check_hostile(message: str) -> None:
    """Checks a hostile message with every kind of rule. GENUINE defines the expected results independently."""
    is_marker = GENUINE.fullmatch(message) is not None
    assert (reason(MATCHED, message) == "no_text") is is_marker
    assert (reason(EXACT, message) == "no_text") is (is_marker and message.endswith(MARKER))
    assert reason(SIGNED, message) is None
    assert reason(EXACT, message, None) is None
    assert reason(MATCHED, message, "INTERNAL") is None


def check_genuine(prefix: str, page: int, step: str) -> None:
    rid = new_request_id()
    prefix = prefix.replace(RID, rid)
    for match, message in (
        (EXACT, MARKER),
        (MATCHED, f"{MARKER} page={page}"),
        (SIGNED, signed(claim("no_text", rid).replace("decide", json.dumps(step)[1:-1]))),
    ):
        assert rules(match).reason_of_error(UpstreamError("ALREADY_EXISTS", prefix + message), rid) == "no_text"


def check_surrounded(prefix: str, text: str, tail: str) -> None:
    """Checks a marker with user text before or after it; a prefix or substring match would accept it."""
    for message in (f"{prefix}{text}{MARKER}", f"{prefix}{MARKER}{text}", f"{text}{prefix}{MARKER}", text + tail):
        check_hostile(message)
    genuine = signed(claim())
    for message in (f"{prefix}x{text}{genuine}", f"{prefix}{genuine}x{text}"):
        assert reason(SIGNED, message) is None


ASCII = st.text(alphabet=st.characters(codec="ascii", min_codepoint=32), max_size=40)


@pytest.mark.parametrize("most", [150, pytest.param(15_000, marks=[pytest.mark.full, pytest.mark.timeout(1200)])])
@pytest.mark.parametrize(
    ("check", "strategies"),
    [
        (check_hostile, [st.builds(operator.add, PREFIX, USER_TEXT)]),
        (check_surrounded, [PREFIX, USER_TEXT, st.sampled_from(SPOOFS)]),
        (check_genuine, [PREFIX, st.integers(0, 10**6), ASCII]),
    ],
    ids=["composed", "surrounded", "genuine"],
)
def test_only_genuine_messages_are_exits(check: Callable[..., None], strategies: list[Any], most: int) -> None:
    """Each message is checked with every kind of rule."""
    quiet = settings(max_examples=most, deadline=None, suppress_health_check=list(HealthCheck))
    quiet(given(*strategies)(check))()
