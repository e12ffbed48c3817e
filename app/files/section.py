"""The base class of the sections of ``gateway.yaml``."""

from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _json_value(value: Any) -> Any:
    """Raises ValueError."""
    try:
        written = orjson.loads(orjson.dumps(value))
    except TypeError as exc:
        raise ValueError(f"is not valid in JSON: {exc}") from exc
    if written != value:
        raise ValueError("is not valid in JSON: put dates in quotes, and use finite numbers only")
    return value


JsonValue = Annotated[Any, AfterValidator(_json_value)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
