"""Generates calls of a pipeline that work as pasted: curl, JavaScript and Python.

The address comes from the caller's Host header and values come from gateway.yaml, so every text is quoted.
"""

import functools
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.api.exchange import Exchange
from app.pipelines.examples import Filled, example_of, file_names_of
from app.pipelines.pipeline import Pipeline

_JSON_TYPE = "-H 'Content-Type: application/json'"
_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_PLAIN_PATH = re.compile(r"[\w./-]+")


def base_url_of(exchange: Exchange) -> str:
    """The address that the caller used. A Host header without a valid host and port is ignored."""
    host, scope = exchange.header(b"host") or "", exchange.scope
    if not _HOST.fullmatch(host):
        host = "{}:{}".format(*scope["server"])
    return f"{scope['scheme']}://{host}"


@dataclass(frozen=True, slots=True)
class _Key:
    """How each language sends the key from the environment; empty texts if no keys are required."""

    curl: str = ""
    javascript: str = ""
    python: str = ""
    python_import: str = ""


_NO_KEY = _Key()
_KEY = _Key(
    curl=' -H "Authorization: Bearer $API_KEY"',
    javascript='"Authorization": `Bearer ${process.env.API_KEY}`',
    python="""headers={"Authorization": f"Bearer {os.environ['API_KEY']}"}""",
    python_import="import os\n\n",
)


def samples_of(pipeline: Pipeline, base_url: str, *, with_key: bool = False) -> dict[str, str]:
    """``with_key``: the calls send the key that the variable API_KEY of the environment holds."""
    url, body, files = f"{base_url}/v1/pipelines/{pipeline.name}", example_of(pipeline), file_names_of(pipeline)
    key = _KEY if with_key else _NO_KEY
    if pipeline.session is not None:
        return _session_samples(base_url, url, body, files, key)
    if files:
        return _form_samples(url, _fields(body, files), files, key)
    samples = {
        "curl": _curl(url, body, key),
        "javascript": _javascript(url, body, key),
        "python": _python(url, body, key),
    }
    return samples | {"curl_stream": _curl(f"{url}/stream", body, key, "-N ")} if pipeline.spec.stream else samples


def _session_samples(base_url: str, url: str, body: dict[str, Any], files: dict[str, str], key: _Key) -> dict[str, str]:
    """A session with one step."""
    opening, headers = f"{url}/sessions", ", ".join(filter(None, ['"X-Session-End": "true"', key.javascript]))
    read_url = shlex.quote('import json, sys; print(json.load(sys.stdin)["url"])')
    session, is_last = f"{shlex.quote(base_url)}$session", "-H 'X-Session-End: true' "
    fields = _fields(body, files)
    if files:
        curl = _curl_form(session, fields, files, key, is_last)
        imports, form = _javascript_form(fields, files)
        javascript = f"{form}const body = form;\n"
        python = _python_form(fields, files)
    else:
        curl = _curl_to(session, body, key, is_last)
        values = ", ".join(f"{json.dumps(name)}: {_javascript_value(value)}" for name, value in body.items())
        imports = ""
        javascript = f'const body = JSON.stringify({{{values}}});\nheaders["Content-Type"] = "application/json";\n'
        python = f"json={body!r}"
    client = ", ".join(filter(None, [f"base_url={base_url!r}", key.python]))
    return {
        "curl": f"session=$(curl -s -X POST {shlex.quote(opening)}{key.curl} | python3 -c {read_url})\n{curl}",
        "javascript": f"{imports}const headers = {{{headers}}};\n"
        f'const opened = await fetch({json.dumps(opening)}, {{method: "POST", headers}});\n'
        f"const url = {json.dumps(base_url)} + (await opened.json()).url;\n"
        f"{javascript}"
        'const response = await fetch(url, {method: "POST", headers, body});\nconsole.log(await response.json());',
        "python": f"{key.python_import}import httpx\n\nwith httpx.Client({client}) as client:\n"
        f'    url = client.post({opening!r}).raise_for_status().json()["url"]\n'
        f'    step = client.post(url, {python}, headers={{"X-Session-End": "true"}})\n'
        "    print(step.raise_for_status().json())",
    }


def _curl(url: str, body: dict[str, Any], key: _Key, options: str = "") -> str:
    return _curl_to(shlex.quote(url), body, key, options)


def _curl_to(quoted_url: str, body: dict[str, Any], key: _Key, options: str) -> str:
    call = f"curl {options}{quoted_url}{key.curl} {_JSON_TYPE}"
    if any(isinstance(value, Filled) for value in body.values()):
        script = f"import json; print(json.dumps({body!r}))"
        return f"python3 -c {shlex.quote(script)} | {call} -d @-"
    return f"{call} -d {shlex.quote(json.dumps(body))}"


def _javascript(url: str, body: dict[str, Any], key: _Key) -> str:
    headers = ", ".join(filter(None, ['"Content-Type": "application/json"', key.javascript]))
    values = ", ".join(f"{json.dumps(name)}: {_javascript_value(value)}" for name, value in body.items())
    return (
        f"const response = await fetch({json.dumps(url)}, {{\n"
        f'  method: "POST",\n  headers: {{{headers}}},\n'
        f"  body: JSON.stringify({{{values}}}),\n}});\nconsole.log(await response.json());"
    )


def _javascript_value(value: Any) -> str:
    if not isinstance(value, Filled):
        return json.dumps(value)
    return functools.reduce(
        lambda text, size: f"Array({size}).fill({text})", reversed(value.shape), json.dumps(value.element)
    )


def _python(url: str, body: dict[str, Any], key: _Key) -> str:
    arguments = ", ".join(filter(None, [repr(url), f"json={body!r}", key.python]))
    return f"{key.python_import}import httpx\n\nprint(httpx.post({arguments}).raise_for_status().json())"


def _fields(body: dict[str, Any], files: dict[str, str]) -> dict[str, str]:
    """The texts of a form, without its files."""
    return {name: _field_text(value) for name, value in body.items() if name not in files and value is not None}


def _form_samples(url: str, fields: dict[str, str], files: dict[str, str], key: _Key) -> dict[str, str]:
    headers = f", headers: {{{key.javascript}}}" if key.javascript else ""
    imports, form = _javascript_form(fields, files)
    arguments = ", ".join(filter(None, [repr(url), _python_form(fields, files), key.python]))
    return {
        "curl": _curl_form(shlex.quote(url), fields, files, key),
        "javascript": f"{imports}{form}"
        f'const response = await fetch({json.dumps(url)}, {{method: "POST"{headers}, body: form}});\n'
        "console.log(await response.json());",
        "python": f"{key.python_import}import httpx\n\nprint(httpx.post({arguments}).raise_for_status().json())",
    }


def _curl_form(quoted_url: str, fields: dict[str, str], files: dict[str, str], key: _Key, options: str = "") -> str:
    """Uses ``--form-string``, because with ``-F`` curl reads values that begin with @ or < from a file."""
    parts = [f"-F {shlex.quote(f'{name}=@{_curl_path(path)}')}" for name, path in files.items()]
    parts += [f"--form-string {shlex.quote(f'{name}={text}')}" for name, text in fields.items()]
    return " ".join([f"curl {options}{quoted_url}{key.curl}", *parts])


def _curl_path(path: str) -> str:
    """Quotes a path in which curl would read ``;`` and ``,`` as the start of options."""
    if _PLAIN_PATH.fullmatch(path):
        return path
    escaped = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _javascript_form(fields: dict[str, str], files: dict[str, str]) -> tuple[str, str]:
    """Returns the imports, and the lines that make the form."""
    texts = [f"form.append({json.dumps(name)}, {json.dumps(text)});\n" for name, text in fields.items()]
    blobs = [
        f"form.append({json.dumps(name)}, await openAsBlob({json.dumps(path)}), {json.dumps(Path(path).name)});\n"
        for name, path in files.items()
    ]
    return (
        '// Node.js. In a page, append the File of an <input type="file"> instead.\n'
        'import { openAsBlob } from "node:fs";\n\n',
        f"const form = new FormData();\n{''.join(blobs + texts)}",
    )


def _python_form(fields: dict[str, str], files: dict[str, str]) -> str:
    """Returns the arguments of a call."""
    opened = ", ".join(f"{name!r}: open({path!r}, 'rb')" for name, path in files.items())
    return f"files={{{opened}}}" + (f", data={fields!r}" if fields else "")


def _field_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value.nested() if isinstance(value, Filled) else value)
