"""Generates calls of a pipeline that work as pasted: curl, JavaScript and Python.

The address comes from the caller's Host header and values come from gateway.yaml, so every text is quoted.
"""

import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

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


class SampleParts(NamedTuple):
    """The parts of a call with a body, by language. ``curl_pipe`` begins a pipeline of the shell."""

    curl_pipe: str
    curl: str
    imports: str
    before: str
    headers: dict[str, str]
    body: str
    python: str


class KeyParts(NamedTuple):
    """How each language sends the key from the environment; empty texts if no keys are required."""

    curl: str
    headers: dict[str, str]
    python: str
    python_import: str


NO_KEY = KeyParts("", {}, "", "")
KEY = KeyParts(
    ' -H "Authorization: Bearer $API_KEY"',
    {"Authorization": "`Bearer ${process.env.API_KEY}`"},
    """headers={"Authorization": f"Bearer {os.environ['API_KEY']}"}""",
    "import os\n\n",
)


def samples_of(pipeline: Pipeline, base_url: str, *, with_key: bool = False) -> dict[str, str]:
    """``with_key``: the calls send the key that the variable API_KEY of the environment holds."""
    url, key, parts = f"{base_url}/v1/pipelines/{pipeline.name}", KEY if with_key else NO_KEY, parts_of(pipeline)
    arguments = ", ".join(filter(None, [repr(url), parts.python, key.python]))
    samples = {
        "curl": f"{parts.curl_pipe}curl {shlex.quote(url)}{key.curl} {parts.curl}",
        "javascript": parts.imports
        + parts.before
        + javascript_call("response", json.dumps(url), parts.headers | key.headers, parts.body)
        + "console.log(await response.json());",
        "python": f"{key.python_import}import httpx\n\nprint(httpx.post({arguments}).raise_for_status().json())",
    }
    if pipeline.spec.stream is not None and "Content-Type" in parts.headers:
        samples["curl_stream"] = f"{parts.curl_pipe}curl -N {shlex.quote(f'{url}/stream')}{key.curl} {parts.curl}"
    return samples


def javascript_call(name: str, url: str, headers: dict[str, str], body: str = "") -> str:
    """Assigns the answer of a POST. ``headers``: the values are expressions."""
    sent = f"  headers: {{{', '.join(f'{json.dumps(each)}: {value}' for each, value in headers.items())}}},\n"
    text = f'const {name} = await fetch({url}, {{\n  method: "POST",\n{sent if headers else ""}'
    return text + (f"  body: {body},\n" if body else "") + "});\n"


def parts_of(pipeline: Pipeline) -> SampleParts:
    """The body of the pipeline's example: a form if it has files, otherwise JSON."""
    body, files = example_of(pipeline), file_names_of(pipeline)
    if files:
        return _form(files, {name: value for name, value in body.items() if name not in files and value is not None})
    if any(isinstance(value, Filled) for value in body.values()):
        pipe, sent = f"python3 -c {shlex.quote(f'import json; print(json.dumps({body!r}))')} | ", "@-"
    else:
        pipe, sent = "", shlex.quote(json.dumps(body))
    values = ", ".join(f"{json.dumps(name)}: {_javascript_value(value)}" for name, value in body.items())
    headers = {"Content-Type": '"application/json"'}
    return SampleParts(
        pipe, f"{_JSON_TYPE} -d {sent}", "", "", headers, f"JSON.stringify({{{values}}})", f"json={body!r}"
    )


def _form(files: dict[str, str], values: dict[str, Any]) -> SampleParts:
    """Curl gets ``--form-string``, because with ``-F`` it reads values that begin with @ or < from a file."""
    plain = {name: value.nested() if isinstance(value, Filled) else value for name, value in values.items()}
    fields = {name: value if isinstance(value, str) else json.dumps(value) for name, value in plain.items()}
    # In other paths, curl would read ``;`` and ``,`` as the start of options.
    paths = {
        name: path if _PLAIN_PATH.fullmatch(path) else json.dumps(path, ensure_ascii=False)
        for name, path in files.items()
    }
    curl = [f"-F {shlex.quote(f'{name}=@{path}')}" for name, path in paths.items()]
    curl += [f"--form-string {shlex.quote(f'{name}={text}')}" for name, text in fields.items()]
    lines = [
        f"form.append({json.dumps(name)}, await openAsBlob({json.dumps(path)}), {json.dumps(Path(path).name)});\n"
        for name, path in files.items()
    ]
    lines += [f"form.append({json.dumps(name)}, {json.dumps(text)});\n" for name, text in fields.items()]
    imports = (
        '// Node.js. In a page, append the File of an <input type="file"> instead.\n'
        'import { openAsBlob } from "node:fs";\n\n'
    )
    opened = ", ".join(f"{name!r}: open({path!r}, 'rb')" for name, path in files.items())
    python = f"files={{{opened}}}" + (f", data={fields!r}" if fields else "")
    before = f"const form = new FormData();\n{''.join(lines)}"
    return SampleParts("", " ".join(curl), imports, before, {}, "form", python)


def _javascript_value(value: Any) -> str:
    if not isinstance(value, Filled):
        return json.dumps(value)
    return functools.reduce(
        lambda text, size: f"Array({size}).fill({text})", reversed(value.shape), json.dumps(value.element)
    )
