"""Origins of pages as browsers send them: scheme, host and port. Source: the URL standard of WHATWG, 4.6 and 4.7."""

import re
from urllib.parse import urlsplit

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def check_origin(text: str) -> None:
    """Accepts an origin, ``null``, and ``*`` for every origin. Raises ValueError with the right form."""
    if text in ("*", "null"):
        return
    if "*" in text:
        raise ValueError(f"'{text}' has a wildcard: list each origin, or write * alone, which allows every origin")
    if text.lower().startswith("file:"):
        raise ValueError("the origin of a page that is opened as a file is null")
    scheme = "http" if text.startswith(("localhost", "127.", "[::1]")) else "https"
    right = _origin_of(text if "://" in text else f"{scheme}://{text}")
    if text != right:
        form = f"write {right}" if right else "write it as in https://app.example.com"
        raise ValueError(f"an origin is a scheme, a host in lower case, and a port unless it is the default: {form}")


def _origin_of(url: str) -> str | None:
    """Returns None if the URL has no valid origin."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        port = "" if parts.port in (None, _DEFAULT_PORTS.get(parts.scheme)) else f":{parts.port}"
    except ValueError:
        return None
    origin = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}"
    return origin if _ORIGIN.fullmatch(origin) else None
