"""Recognizes the messages with which a model, such as an LLM backend, refuses a request that its caller can correct."""

import re
from collections.abc import Iterable, Sequence

from app.core.errors import ClientError, ContextLengthExceeded, FieldProblem, InvalidInput
from app.core.text import nearest
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.spec import RefusalRule

LONGEST_MESSAGE = 4096
"""Only this much of a message is searched."""
_HINT = "The gateway's log has the model's message in the line with this request id."
_DETAIL = {
    "context_length_exceeded": "The request is longer than the model's context.",
    "invalid_input": "The model refused the input.",
}
_PROBLEM = {
    "context_length_exceeded": "is longer than the model's context",
    "invalid_input": "is not accepted by the model",
}


def refusal_of(rules: Sequence[RefusalRule], message: str) -> ClientError | None:
    """Returns the caller's error of the first rule that matches the model's message, which the error does not show."""
    message = message[:LONGEST_MESSAGE]
    rule = next((each for each in rules if re.search(each.message_pattern, message)), None)
    if rule is None:
        return None
    kind = ContextLengthExceeded if rule.code == "context_length_exceeded" else InvalidInput
    problems = [] if rule.field is None else [FieldProblem(rule.field, _PROBLEM[rule.code])]
    return kind(rule.detail or _DETAIL[rule.code], hint=_HINT, errors=problems)


def check_fields(rules: Sequence[RefusalRule], names: Iterable[str]) -> None:
    """``names``: of the pipeline's inputs and parameters. Raises PipelineMismatch for another name in a rule."""
    known = list(names)
    for index, rule in enumerate(rules):
        if rule.field is not None and rule.field not in known:
            text = f"'{rule.field}' is not a field of the pipeline{nearest(rule.field, known)}"
            raise PipelineMismatch(("refusals", index, "field"), text)
