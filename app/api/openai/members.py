"""The members of a body in OpenAI's form: the gateway reads some, the others are fields of the pipeline."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from app.api.openai.neutral import NOT_SUPPORTED, Neutral
from app.domain.errors import FieldProblem, InvalidInput
from app.domain.printable import shown
from app.pipelines.body import Body, is_null, problem_of_value, refused
from app.pipelines.structure import has_more_elements, malformed, members_of

Members = dict[str, memoryview]
"""The members that are not null, as JSON."""
Value = TypeVar("Value")

MAX_MEMBERS = 256
MAX_ELEMENTS = 64
"""Limit of the values and members nested in one member, because each uses more memory than its text."""


def read_members(body: Body) -> Members:
    """Raises InvalidJson, InvalidRequest, or InvalidInput for a member that is given twice."""
    members: Members = {}
    for name, text in members_of(memoryview(body)):
        if name in members:
            raise refused([FieldProblem(shown(name), "is given twice")])
        if len(members) == MAX_MEMBERS:
            raise refused([FieldProblem("body", f"has more than {MAX_MEMBERS} fields")])
        members[name] = text
    return {name: text for name, text in members.items() if not is_null(text)}


def take(members: Members, name: str, type_: Any, default: Value, *, max_elements: int = MAX_ELEMENTS) -> Value:
    """Takes a member out. Raises InvalidInput or InvalidJson."""
    text = members.pop(name, None)
    return default if text is None else _decoded(name, text, type_, max_elements)


def _decoded(name: str, text: memoryview, type_: Any, max_elements: int = MAX_ELEMENTS) -> Any:
    """Raises InvalidInput or InvalidJson."""
    if len(text) > 2 * max_elements and has_more_elements(text, max_elements):
        raise refused([FieldProblem(name, f"has more than {max_elements} elements")])
    try:
        return msgspec.json.decode(text, type=type_)
    except msgspec.ValidationError as exc:
        raise refused([problem_of_value(name, str(exc))]) from exc
    except (ValueError, RecursionError) as exc:
        raise malformed() from exc


def required(name: str) -> InvalidInput:
    return refused([FieldProblem(name, "is required")])


def body_of_fields(
    prompt: Mapping[str, Body],
    members: Members,
    field_by_parameter: Mapping[str, str],
    neutral: Mapping[str, Neutral],
) -> bytes:
    """Returns the pipeline's JSON body: the prompt, and each member under its name in the pipeline.

    ``neutral``: other members that are checked and omitted.

    Raises InvalidInput for members that the pipeline has no field for, and InvalidJson.
    """
    problems: list[FieldProblem] = []
    fields: dict[str, Body] = dict(prompt)
    for name, text in members.items():
        field = field_by_parameter.get(name)
        if field in fields:
            problems.append(FieldProblem(name, "is given twice, under two names"))
        elif field is not None:
            fields[field] = text
        else:
            problems += _problems_of(name, text, neutral.get(name))
    if problems:
        raise refused(problems)
    pieces: list[Body] = []
    for name, value in fields.items():
        pieces += [b"," if pieces else b"{", msgspec.json.encode(name), b":", value]
    return b"".join([*pieces, b"}"])


def renamed(error: InvalidInput, name_by_field: Mapping[str, str]) -> InvalidInput:
    """Returns the error with the caller's field names. A name may be followed by a path inside the value."""
    problems = []
    for problem in error.errors:
        field = next((each for each in name_by_field if problem.field.startswith(each)), None)
        rest = problem.field[len(field) :] if field is not None else ""
        is_path = field is not None and (not rest or rest[0] in ".[")
        name = name_by_field[field] + rest if field is not None and is_path else problem.field
        problems.append(FieldProblem(name, problem.problem))
    return refused(problems) if problems else error


def _problems_of(name: str, text: memoryview, neutral: Neutral | None) -> Sequence[FieldProblem]:
    """Returns what is wrong with a member that the pipeline has no field for. Raises InvalidJson."""
    if neutral is None:
        return [FieldProblem(shown(name), NOT_SUPPORTED)]
    if neutral.type is None:
        return () if _is_one_of(neutral.values, text) else [FieldProblem(name, neutral.otherwise)]
    try:
        _decoded(name, text, neutral.type)
    except InvalidInput as exc:
        return exc.errors
    return ()


def _is_one_of(values: Sequence[Any], text: memoryview) -> bool:
    """Raises InvalidJson."""
    if len(text) > 256:
        return False
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError) as exc:
        raise malformed() from exc
    return any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in values)
