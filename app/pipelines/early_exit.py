"""Detects early exits of a pipeline, which are ordinary empty results and not errors.

Only the pipeline's rules decide, and the first matching rule applies. An ``error`` rule compares the code, if Triton
sends one, and the *whole* message without Triton's prefixes. With a prefix or substring match, text of a user that a
model repeats could imitate an early exit.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from app.core.errors import UpstreamError
from app.pipelines.spec import EarlyExitRule

_SIGNED = re.compile(r"EARLY_EXIT/1 (?P<mac>[0-9a-f]{64}) (?P<claim>\{[^\x00-\x1f]{1,512}\})")


@dataclass(frozen=True, slots=True)
class EarlyExitRules:
    """``ensembles``: the names in Triton's prefixes of a message. ``key``: the key of signed markers."""

    rules: tuple[EarlyExitRule, ...]
    ensembles: frozenset[str]
    key: bytes | None = None

    def __bool__(self) -> bool:
        return bool(self.rules)

    def reason_of_error(self, error: UpstreamError, request_id: str) -> str | None:
        """Returns the reason of the first ``error`` rule that matches Triton's error."""
        message, code = self.bare(error.message, request_id), error.grpc_code
        for rule in self.rules:
            match = rule.error
            if match is None or match.code not in ("any", code if code or not match.signed else match.code):
                continue
            if match.signed:
                holds = self._is_signed(message, rule.reason, request_id)
            elif match.message is not None:
                holds = message == match.message
            else:
                holds = re.fullmatch(match.message_pattern or "", message) is not None
            if holds:
                return rule.reason
        return None

    def reason_but_for_code(self, error: UpstreamError, request_id: str) -> str | None:
        """The reason of a rule with the same message but another code, which BLS scripts and streams lose."""
        message = self.bare(error.message, request_id)
        same = (rule.reason for rule in self.rules if rule.error is not None and rule.error.message == message)
        return next(same, None)

    def bare(self, message: str, request_id: str) -> str:
        """Removes Triton's prefixes that name an ensemble of this pipeline or this request from the message."""
        prefixes = (*(f"in ensemble '{name}', " for name in self.ensembles), f"[request id: {request_id}] ")
        while prefix := next(filter(message.startswith, prefixes), ""):
            message = message.removeprefix(prefix)
        return message

    def reason_of_outputs(self, written: Collection[str], empty: Collection[str]) -> str | None:
        """Returns the reason of the first ``missing`` or ``empty`` rule that matches, by tensor names.

        ``empty``: the written outputs that had no element in the whole answer.
        """
        for rule in self.rules:
            if rule.missing is not None and not any(name in written for name in rule.missing):
                return rule.reason
            if rule.empty is not None and all(name in empty for name in rule.empty):
                return rule.reason
        return None

    def _is_signed(self, message: str, reason: str, request_id: str) -> bool:
        found = _SIGNED.fullmatch(message)
        if found is None or self.key is None:
            return False
        expected = hmac.new(self.key, found["claim"].encode(), hashlib.sha256).hexdigest()
        if not hmac.compare_digest(expected, found["mac"]):
            return False
        try:
            said = json.loads(found["claim"])
        except ValueError:
            return False
        return isinstance(said, dict) and said.get("reason") == reason and said.get("rid") == request_id
