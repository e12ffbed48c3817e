"""The response class of every JSON answer."""

from typing import Any

import orjson
from starlette.responses import Response


class JsonResponse(Response):
    """JSON by orjson: numpy arrays are lists, and NaN and infinity are ``null``."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
