"""Checks the request parameters of a caller, including those that Triton interprets."""

from collections.abc import Mapping

import msgspec

from app.core.errors import InvalidInput, InvalidJson
from app.core.inference import Parameter
from app.core.sequence import SequenceIds
from app.core.text import shown
from app.pipelines.spec import RESERVED_PARAMETERS

MAX_PARAMETERS = 64
MAX_NAME = 128
MAX_TEXT = 4096

_TYPES_BY_NAME: Mapping[str, tuple[type, ...]] = {
    "sequence_id": (int, str),
    "sequence_start": (bool,),
    "sequence_end": (bool,),
    "priority": (int,),
    "timeout": (int,),
}
"""Triton's sequence and schedule policy extensions. Every other parameter that Triton interprets is refused."""
_EXPECTED_BY_TYPE: Mapping[type, str] = {int: "unsigned-integer", bool: "boolean"}
_parameter = msgspec.json.Decoder(bool | int | float | str)


def checked(parameters: Mapping[str, Parameter], sequence_ids: SequenceIds) -> dict[str, Parameter]:
    """Raises InvalidInput."""
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidInput(f"The request has more than {MAX_PARAMETERS} parameters.")
    for name, value in parameters.items():
        _check(name, value)
    sequence_ids.check(parameters.get("sequence_id", 0))
    return dict(parameters)


def parameter_of(name: str, text: memoryview) -> Parameter:
    """Raises InvalidInput or InvalidJson."""
    try:
        value: Parameter = _parameter.decode(text)
    except msgspec.ValidationError as exc:
        raise InvalidInput(
            f"parameter '{shown(name)}' has invalid type. It should be either 'int', 'float', 'bool', or 'string'."
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidJson("The body is not JSON.") from exc
    return value


def _check(name: str, value: Parameter) -> None:
    types = _TYPES_BY_NAME.get(name)
    if types is not None:
        if type(value) not in types or (type(value) is int and value < 0):
            expected = _EXPECTED_BY_TYPE[types[0]]
            raise InvalidInput(f"Unable to parse '{name}': attempt to access JSON non-{expected} as {expected}")
    elif name.startswith("triton_"):
        raise InvalidInput(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified. "
            f"The request has '{shown(name)}'."
        )
    elif RESERVED_PARAMETERS.fullmatch(name) or name == "traceparent":
        raise InvalidInput(f"parameter '{shown(name)}' is reserved and should not be specified.")
    if not (0 < len(name) <= MAX_NAME and name.isascii() and name.isprintable()):
        raise InvalidInput(
            f"parameter '{shown(name)}' has an invalid name; expected 1 to {MAX_NAME} printable characters of ASCII."
        )
    if isinstance(value, str) and (len(value) > MAX_TEXT or "\0" in value):  # Triton truncates text at a NUL
        raise InvalidInput(f"parameter '{shown(name)}' must have at most {MAX_TEXT} characters, and no NUL.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63 and name != "sequence_id":
        raise InvalidInput(f"parameter '{shown(name)}' is an integer beyond 64 bits.")
