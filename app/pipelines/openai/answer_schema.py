"""Checks a model's answer against a caller's JSON schema, of the draft 2020-12, with patterns of linear time.

``format`` is not checked. Source: https://json-schema.org/draft/2020-12/json-schema-validation.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from app.pipelines.openai.schema_cost import SchemaCost

if TYPE_CHECKING:
    from jsonschema_rs import Draft202012Validator

CAN_CHECK = find_spec("jsonschema_rs") is not None
"""Whether the extra ``jsonschema-rs`` is installed."""
MAX_PATTERNS = 64
MAX_PATTERN_BYTES = 64 * 1024
"""Limit of the memory of a compiled pattern."""
MAX_ANSWER_CHARACTERS = 1024 * 1024
_MAX_EXPLAINED_STEPS = 4096
"""A message takes up to 0.1 ms for each step, because each branch of an ``anyOf`` has errors of its own."""
TOO_LARGE = "is too large to be checked"


class AnswerSchema:
    """``schema``: None accepts any object."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        """Raises ValueError with what is wrong with the schema. A schema needs the extra ``jsonschema-rs``."""
        self._cost = None if schema is None else SchemaCost(schema)
        self._validator = None if schema is None else _validator_of(schema)

    @property
    def has_rules(self) -> bool:
        """Whether the answer must fit a schema."""
        return self._validator is not None

    def problem_of(self, text: str) -> str | None:
        """Returns what is wrong with the answer; None for nothing. Takes up to about half a second."""
        if len(text) > MAX_ANSWER_CHARACTERS:
            return TOO_LARGE
        try:
            value = msgspec.json.decode(text)
        except (ValueError, RecursionError):
            return "is not JSON"
        if self._validator is None or self._cost is None:
            return None if isinstance(value, dict) else "is not an object"
        steps = self._cost.steps_of(value)
        return TOO_LARGE if steps is None else _problem_of(self._validator, value, steps)


def _validator_of(schema: Mapping[str, Any]) -> "Draft202012Validator":
    """Raises ValueError."""
    from jsonschema_rs import Draft202012Validator, RegexOptions, ValidationError  # noqa: PLC0415 - an extra

    if _patterns_of(schema) > MAX_PATTERNS:
        raise ValueError(f"has more than {MAX_PATTERNS} patterns")
    patterns = RegexOptions(size_limit=MAX_PATTERN_BYTES, dfa_size_limit=MAX_PATTERN_BYTES)
    own = {name: value for name, value in schema.items() if name != "$schema"}
    try:
        return Draft202012Validator(own, pattern_options=patterns, validate_formats=False, offline=True)
    except ValidationError as exc:
        raise ValueError(f"is not a JSON schema that can be checked: {exc.message}") from exc


def _patterns_of(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_patterns_of, value))
    if not isinstance(value, dict):
        return 0
    named = value.get("patternProperties")
    own = isinstance(value.get("pattern"), str) + (len(named) if isinstance(named, dict) else 0)
    return own + sum(map(_patterns_of, value.values()))


def _problem_of(validator: "Draft202012Validator", value: Any, steps: int) -> str | None:
    from jsonschema_rs import ValidationError  # noqa: PLC0415 - an extra

    try:
        if validator.is_valid(value):
            return None
        if steps > _MAX_EXPLAINED_STEPS:
            return "does not fit the schema"
        validator.validate(value)
    except ValidationError as exc:
        at = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in exc.instance_path)
        return f"does not fit the schema at {at.removeprefix('.') or 'its root'}: {exc.message}"
    except ValueError:  # the value is nested too deeply
        return TOO_LARGE
    return None
