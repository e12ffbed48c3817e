"""Generates calls of a pipeline that work as pasted: curl, JavaScript and Python. `samples.jinja` has their texts.

The address comes from the caller's Host header and values come from gateway.yaml, so every text is quoted.
"""

import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from app.api.exchange import Exchange
from app.pipelines.examples import Filled, example_of, file_names_of
from app.pipelines.pipeline import Pipeline

_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_PLAIN_PATH = re.compile(r"[\w./-]+")
_TEMPLATES = Environment(loader=PackageLoader("app.api", ""), trim_blocks=True, lstrip_blocks=True)
_TEMPLATES.filters |= {"sh": shlex.quote, "json": json.dumps, "repr": repr}


def base_url_of(exchange: Exchange) -> str:
    """The address that the caller used. A Host header without a valid host and port is ignored."""
    host, scope = exchange.header(b"host") or "", exchange.scope
    if not _HOST.fullmatch(host):
        host = "{}:{}".format(*scope["server"])
    return f"{scope['scheme']}://{host}"


def samples_of(
    pipeline: Pipeline, base_url: str, *, with_key: bool = False, template: str = "pipelines/samples.jinja"
) -> dict[str, str]:
    """``with_key``: the calls send the key that the variable API_KEY of the environment holds.

    The body is the pipeline's example: a form if it has files, otherwise JSON.
    """
    body, names = example_of(pipeline), file_names_of(pipeline)
    # In other paths, curl would read ``;`` and ``,`` as the start of options.
    quoted = (path if _PLAIN_PATH.fullmatch(path) else json.dumps(path, ensure_ascii=False) for path in names.values())
    texts = {
        name: value.nested() if isinstance(value, Filled) else value
        for name, value in body.items()
        if names and name not in names and value is not None
    }
    calls: Any = _TEMPLATES.get_template(template).make_module(
        {
            "base_url": base_url,
            "url": f"{base_url}/v1/pipelines/{pipeline.name}",
            "with_key": with_key,
            "streams": pipeline.spec.stream is not None,
            "body": body,
            "is_large": not names and any(isinstance(value, Filled) for value in body.values()),
            "members": [f"{json.dumps(name)}: {_javascript_value(value)}" for name, value in body.items()],
            "files": [(*each, file, Path(each[1]).name) for each, file in zip(names.items(), quoted, strict=True)],
            "fields": {name: text if isinstance(text, str) else json.dumps(text) for name, text in texts.items()},
        }
    )
    samples = {name: getattr(calls, name)().strip() for name in ("curl", "javascript", "python", "curl_stream")}
    return {name: text for name, text in samples.items() if text}


def _javascript_value(value: Any) -> str:
    if not isinstance(value, Filled):
        return json.dumps(value)
    return functools.reduce(
        lambda text, size: f"Array({size}).fill({text})", reversed(value.shape), json.dumps(value.element)
    )
