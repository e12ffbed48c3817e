"""Generates calls of a pipeline that work as pasted: curl, JavaScript and Python.

The address comes from the caller's Host header and values come from gateway.yaml, so every text is quoted.
"""

import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

from starlette.requests import Request

from app.pipelines.example import Filled, example_of, file_names_of
from app.pipelines.pipeline import Pipeline

_JSON_TYPE = "-H 'Content-Type: application/json'"
_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_PLAIN_PATH = re.compile(r"[\w./-]+")


def base_url_of(request: Request) -> str:
    """The address that the caller used. A Host header without a valid host and port is ignored."""
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        host = "{}:{}".format(*request.scope["server"])
    return f"{request.scope['scheme']}://{host}"


def samples_of(pipeline: Pipeline, base_url: str) -> dict[str, str]:
    url, body, files = f"{base_url}/v1/pipelines/{pipeline.name}", example_of(pipeline), file_names_of(pipeline)
    if files:
        return _form_samples(url, {name: value for name, value in body.items() if name not in files}, files)
    samples = {"curl": _curl(url, body), "javascript": _javascript(url, body), "python": _python(url, body)}
    return samples | {"curl_stream": _curl(f"{url}/stream", body, "-N ")} if pipeline.spec.stream else samples


def _curl(url: str, body: dict[str, Any], options: str = "") -> str:
    call = f"curl {options}{shlex.quote(url)} {_JSON_TYPE}"
    if any(isinstance(value, Filled) for value in body.values()):
        script = f"import json; print(json.dumps({body!r}))"
        return f"python3 -c {shlex.quote(script)} | {call} -d @-"
    return f"{call} -d {shlex.quote(json.dumps(body))}"


def _javascript(url: str, body: dict[str, Any]) -> str:
    values = ", ".join(f"{json.dumps(name)}: {_javascript_value(value)}" for name, value in body.items())
    return (
        f"const response = await fetch({json.dumps(url)}, {{\n"
        f'  method: "POST",\n  headers: {{"Content-Type": "application/json"}},\n'
        f"  body: JSON.stringify({{{values}}}),\n}});\nconsole.log(await response.json());"
    )


def _javascript_value(value: Any) -> str:
    if not isinstance(value, Filled):
        return json.dumps(value)
    return functools.reduce(
        lambda text, size: f"Array({size}).fill({text})", reversed(value.shape), json.dumps(value.element)
    )


def _python(url: str, body: dict[str, Any]) -> str:
    return f"import httpx\n\nprint(httpx.post({url!r}, json={body!r}).raise_for_status().json())"


def _form_samples(url: str, body: dict[str, Any], files: dict[str, str]) -> dict[str, str]:
    fields = {name: _field_text(value) for name, value in body.items() if value is not None}
    return {
        "curl": _curl_form(url, fields, files),
        "javascript": _javascript_form(url, fields, files),
        "python": _python_form(url, fields, files),
    }


def _curl_form(url: str, fields: dict[str, str], files: dict[str, str]) -> str:
    """Uses ``--form-string``, because with ``-F`` curl reads values that begin with @ or < from a file."""
    parts = [f"-F {shlex.quote(f'{name}=@{_curl_path(path)}')}" for name, path in files.items()]
    parts += [f"--form-string {shlex.quote(f'{name}={text}')}" for name, text in fields.items()]
    return " ".join(["curl", shlex.quote(url), *parts])


def _curl_path(path: str) -> str:
    """Quotes a path in which curl would read ``;`` and ``,`` as the start of options."""
    if _PLAIN_PATH.fullmatch(path):
        return path
    escaped = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _javascript_form(url: str, fields: dict[str, str], files: dict[str, str]) -> str:
    texts = [f"form.append({json.dumps(name)}, {json.dumps(text)});\n" for name, text in fields.items()]
    blobs = [
        f"form.append({json.dumps(name)}, await openAsBlob({json.dumps(path)}), {json.dumps(Path(path).name)});\n"
        for name, path in files.items()
    ]
    return (
        '// Node.js. In a page, append the File of an <input type="file"> instead.\n'
        'import { openAsBlob } from "node:fs";\n\n'
        f"const form = new FormData();\n{''.join(blobs + texts)}"
        f'const response = await fetch({json.dumps(url)}, {{method: "POST", body: form}});\n'
        "console.log(await response.json());"
    )


def _python_form(url: str, fields: dict[str, str], files: dict[str, str]) -> str:
    opened = ", ".join(f"{name!r}: open({path!r}, 'rb')" for name, path in files.items())
    data = f", data={fields!r}" if fields else ""
    return (
        f"import httpx\n\nfiles = {{{opened}}}\nprint(httpx.post({url!r}, files=files{data}).raise_for_status().json())"
    )


def _field_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value.nested() if isinstance(value, Filled) else value)
