"""Log probabilities of tokens: the model's form -> OpenAI's.

The model writes a list with an object for each token: token id -> ``{"logprob", "rank", "decoded_token"}``, the chosen
token first. Source: vLLM's ``Logprob``, and the types of OpenAI's Python client.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from app.core.answer import Values
from app.core.errors import ContractViolation

Alternatives = Mapping[str, Mapping[str, Any]]
"""The chosen token, then the most probable ones."""
LEAST = -9999.0
"""OpenAI's number for a token that has no probability."""


def alternatives_of(value: Any, output: str) -> Sequence[Alternatives] | None:
    """Reads the tokens of one response, the value of an output; None for null. Raises ContractViolation."""
    try:
        return msgspec.convert(value, list[dict[str, dict[str, Any]]] | None)
    except msgspec.ValidationError as exc:
        text = f"Output '{output}' is not a list with an object for each token."
        raise ContractViolation(text, tensor=output) from exc


def completion_logprobs(tokens: Sequence[Alternatives] | None, offset: int) -> Values | None:
    """``offset``: the number of characters before the first token."""
    if tokens is None:
        return None
    chosen = [next(iter(token.values()), {}) for token in tokens]
    texts = list(map(_text_of, chosen))
    return {
        "tokens": texts,
        "token_logprobs": list(map(_logprob_of, chosen)),
        "top_logprobs": [{_text_of(each): _logprob_of(each) for each in token.values()} for token in tokens],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset))[: len(texts)],
    }


def chat_logprobs(tokens: Sequence[Alternatives] | None, most: int) -> Values | None:
    """``most``: the number of alternatives for a token."""
    if tokens is None:
        return None
    content = []
    for token in tokens:
        probable = sorted(token.values(), key=_logprob_of, reverse=True)[:most]
        chosen = _described(next(iter(token.values()), {}))
        content.append({**chosen, "top_logprobs": list(map(_described, probable))})
    return {"content": content, "refusal": None}


def _described(alternative: Mapping[str, Any]) -> Values:
    text = _text_of(alternative)
    return {"token": text, "logprob": _logprob_of(alternative), "bytes": list(text.encode())}


def _text_of(alternative: Mapping[str, Any]) -> str:
    return str(alternative.get("decoded_token") or "")


def _logprob_of(alternative: Mapping[str, Any]) -> float:
    number = alternative.get("logprob")
    return max(float(number), LEAST) if isinstance(number, int | float) else LEAST
