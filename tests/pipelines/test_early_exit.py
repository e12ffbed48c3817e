"""An error is an early exit only by the pipeline's rules and its whole message, never because of a user's text.

In these tests an attacker controls text in a model's error and knows the rules, the markers, all model names and the
ids of other requests. The attacker does not know the gateway's id of this request, or the key.
"""

import hashlib
import hmac
import itertools
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


LEGAL_PREFIXES = [
    in_ensembles(names) + rid
    for count in range(4)
    for names in itertools.product(sorted(ENSEMBLES), repeat=count)
    for rid in ("", f"[request id: {RID}] ")
]


class TestGenuineExits:
    @pytest.mark.parametrize(
        ("match", "message"),
        [(EXACT, MARKER), (MATCHED, MARKER), (MATCHED, MARKER + " page=12"), (SIGNED, signed(claim()))],
    )
    def test_exits_are_found_after_any_prefix_of_triton(self, match: ErrorMatch, message: str) -> None:
        missed = [prefix for prefix in LEGAL_PREFIXES if reason(match, prefix + message) != "no_text"]
        assert missed == []

    def test_the_first_rule_that_holds_wins(self) -> None:
        both = EarlyExitRules(
            (
                EarlyExitRule(reason="never", error=ErrorMatch(code="ABORTED", message=MARKER)),
                EarlyExitRule(reason="first", error=MATCHED),
                EarlyExitRule(reason="second", error=EXACT),
            ),
            ENSEMBLES,
        )
        assert both.reason_of_error(UpstreamError("ALREADY_EXISTS", MARKER), RID) == "first"

    def test_a_marker_selects_one_of_several_reasons(self) -> None:
        both = EarlyExitRules(
            tuple(EarlyExitRule(reason=name, error=SIGNED) for name in ("no_text", "no_face")), ENSEMBLES, KEY
        )
        assert both.reason_of_error(UpstreamError("ALREADY_EXISTS", signed(claim("no_face"))), RID) == "no_face"

    def test_no_exit_without_rules(self) -> None:
        assert not EarlyExitRules((), ENSEMBLES)
        assert EarlyExitRules((), ENSEMBLES).reason_of_error(UpstreamError("ALREADY_EXISTS", MARKER), RID) is None


class TestCodes:
    @pytest.mark.parametrize("match", [EXACT, MATCHED])
    @pytest.mark.parametrize("code", ["INTERNAL", "UNAVAILABLE", "already_exists", "", "any", None])
    def test_a_different_or_missing_code_is_not_an_exit(self, match: ErrorMatch, code: str | None) -> None:
        assert reason(match, MARKER, code) is None

    @pytest.mark.parametrize("code", ["INTERNAL", "ALREADY_EXISTS", None])
    def test_code_any_matches_without_a_code(self, code: str | None) -> None:
        assert reason(ErrorMatch(code="any", message=MARKER), MARKER, code) == "no_text"

    def test_a_signed_marker_with_a_declared_code(self) -> None:
        match = ErrorMatch(code="ALREADY_EXISTS", signed=True)
        message = signed(claim())
        assert reason(match, message) == "no_text"
        assert reason(match, message, None) == "no_text"
        assert reason(match, message, "INTERNAL") is None

    def test_a_matching_message_with_another_code_gets_a_hint(self) -> None:
        error = UpstreamError("INTERNAL", "in ensemble 'ocr', " + MARKER)
        assert rules(EXACT).reason_but_for_code(error, RID) == "no_text"
        assert rules(EXACT).reason_but_for_code(UpstreamError("INTERNAL", "x" + MARKER), RID) is None


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


class TestSpoofs:
    @pytest.mark.parametrize("match", [EXACT, MATCHED])
    @pytest.mark.parametrize("message", SPOOFS)
    def test_a_marker_with_text_around_it_is_not_an_exit(self, match: ErrorMatch, message: str) -> None:
        assert reason(match, message) is None

    @pytest.mark.parametrize("digits", ["\u0663", "\u0967", "\U0001d7d7"])
    def test_digits_of_other_scripts_match_only_if_the_rule_allows_it(self, digits: str) -> None:
        ascii_only = ErrorMatch(code="any", message_pattern=r"EXIT [0-9]+")
        assert reason(ascii_only, f"EXIT {digits}") is None
        assert reason(ascii_only, "EXIT 9") == "no_text"

    @pytest.mark.parametrize("pattern", ["^EXIT$", "EXIT$", r"\AEXIT\Z", "(?m)^EXIT$", "X|EXIT|Y", "EXIT|"])
    @pytest.mark.parametrize("message", ["EXIT\n", "\nEXIT", "EXIT\nEXIT", "a\nEXIT\nb", "EXIT Y", "XEXIT"])
    def test_an_expression_is_always_anchored(self, pattern: str, message: str) -> None:
        match = ErrorMatch(code="any", message_pattern=pattern)
        assert reason(match, "EXIT") == "no_text"
        assert reason(match, message) is None

    @pytest.mark.parametrize(
        "message",
        [
            signed(claim(), OTHER_KEY),
            signed(claim(), b""),
            signed(claim(rid=OTHER_RID)),
            signed(claim(rid="")),
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
        ],
    )
    def test_a_marker_without_a_valid_signature_is_rejected(self, message: str) -> None:
        assert reason(SIGNED, message) is None
        assert reason(SIGNED, f"in ensemble 'ocr', {message}") is None

    def test_a_marker_cannot_be_replayed_for_another_request(self) -> None:
        other = rules(SIGNED).reason_of_error(UpstreamError(None, signed(claim())), OTHER_RID)
        assert other is None

    def test_without_a_key_no_signature_matches(self) -> None:
        assert reason(SIGNED, signed(claim()), key=None) is None
        assert reason(SIGNED, signed(claim(), b""), key=None) is None


class TestOutputs:
    @pytest.mark.parametrize(
        ("written", "empty", "expected"),
        [
            ({"Y", "Z"}, set(), None),
            ({"Z"}, set(), "no_y"),
            (set(), set(), "no_y"),
            ({"Y", "Z"}, {"Y"}, None),
            ({"Y", "Z"}, {"Y", "Z"}, "nothing"),
        ],
    )
    def test_rules_for_missing_and_empty_outputs(
        self, written: set[str], empty: set[str], expected: str | None
    ) -> None:
        both = EarlyExitRules(
            (EarlyExitRule(reason="no_y", missing=["Y"]), EarlyExitRule(reason="nothing", empty=["Y", "Z"])), ENSEMBLES
        )
        assert both.reason_of_outputs(written, empty) == expected

    def test_a_missing_rule_requires_all_its_outputs(self) -> None:
        rule = EarlyExitRules((EarlyExitRule(reason="no", missing=["Y", "Z"]),), ENSEMBLES)
        assert rule.reason_of_outputs({"Z"}, set()) is None
        assert rule.reason_of_outputs({"W"}, set()) == "no"


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
