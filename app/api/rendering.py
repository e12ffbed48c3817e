"""Values as JSON, numpy arrays included; NaN and infinity become null."""

from typing import Any

import orjson
from starlette.responses import Response

JSON = "application/json"


def json_response(values: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY), headers=headers, media_type=JSON)
