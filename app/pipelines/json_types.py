"""The types with which msgspec decodes, checks and describes numbers in JSON."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from app.domain.tensor import DTYPE_BY_DATATYPE, INTEGER_DATATYPES

_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers that are accepted; None: any."""

    minimum: float | None = None
    maximum: float | None = None
    enum: Sequence[Any] | None = None


ANY_NUMBER = Bounds()


def number_type(datatype: str, bounds: Bounds) -> Any:
    """Returns the type of one number, or of one boolean for BOOL. Raises ValueError."""
    if datatype == "BOOL":
        return bool
    return integer_type(datatype, bounds) if datatype in INTEGER_DATATYPES else float_type(bounds)


def integer_type(datatype: str, bounds: Bounds) -> Any:
    """Only bounds within INT64 are part of the type; numpy checks those of UINT64. Raises ValueError."""
    limits = np.iinfo(DTYPE_BY_DATATYPE[datatype])
    low, high = int(limits.min), int(limits.max)
    if bounds.enum:
        if not all(type(value) is int and low <= value <= min(high, _INT64.max) for value in bounds.enum):
            raise ValueError("has an enum whose values are not all integers within the datatype")
        return Literal[tuple(bounds.enum)]
    low = low if bounds.minimum is None else max(low, math.ceil(bounds.minimum))
    high = high if bounds.maximum is None else min(high, math.floor(bounds.maximum))
    if low > high or low > _INT64.max or (bounds.maximum is not None and high > _INT64.max):
        raise ValueError("has bounds that no value of its datatype can meet, or beyond 2**63-1")
    return Annotated[int, Meta(ge=low, le=high if high <= _INT64.max else None)]


def float_type(bounds: Bounds) -> Any:
    schema = {"enum": bounds.enum} if bounds.enum else None
    if bounds.minimum is None and bounds.maximum is None and schema is None:
        return float
    return Annotated[float, Meta(ge=bounds.minimum, le=bounds.maximum, extra_json_schema=schema)]
