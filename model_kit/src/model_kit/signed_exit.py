"""Early exits that callers cannot imitate, for models whose errors contain text of users.

The marker has an HMAC over the id that the gateway gave this one request. The gateway's rule for it is
``error: {code: any, signed: true}``. The key is GATEWAY_EARLY_EXIT_KEY there and EARLY_EXIT_KEY in the environment of
Triton; an embedded Triton is given it by the gateway.
"""

import hmac
import json
import os
from collections.abc import Mapping

from model_kit.outcomes import EarlyExit

KEY_VARIABLE = "EARLY_EXIT_KEY"


def key_of(environment: Mapping[str, str] = os.environ) -> bytes:
    """The key, for a model's ``initialize``: a model without it then fails to load, not at its first exit.

    Raises:
        RuntimeError: the key is not set.
    """
    key = environment.get(KEY_VARIABLE, "")
    if not key:
        raise RuntimeError(f"{KEY_VARIABLE} is not set: signed early exits need the gateway's GATEWAY_EARLY_EXIT_KEY")
    return key.encode()


def signed_exit(step: str, reason: str, request_id: str, key: bytes) -> EarlyExit:
    """The exception to raise in place of ``EarlyExit(reason)``: ``EARLY_EXIT/1 <hex HMAC-SHA256> <claim>``.

    Args:
        step: the name of the model that exits, for the log.
        request_id: ``request.request_id()``; a marker holds for this request alone.
    """
    said = {"step": step, "reason": reason, "rid": request_id}
    claim = json.dumps(said, separators=(",", ":"), sort_keys=True)
    return EarlyExit(reason, f"EARLY_EXIT/1 {hmac.new(key, claim.encode(), 'sha256').hexdigest()} {claim}")
