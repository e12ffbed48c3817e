"""Calls of a pipeline that work as pasted, from its ``sample``: curl, JavaScript and Python."""

import json
import shlex
from typing import Any

from app.pipelines.pipeline import Pipeline


def samples_of(pipeline: Pipeline, base_url: str) -> dict[str, str]:
    """Empty for a pipeline without a sample."""
    sample = pipeline.spec.sample
    if sample is None:
        return {}
    url = f"{base_url}/v1/pipelines/{pipeline.name}"
    files = [field.name for field in pipeline.inputs if field.is_file and field.name in sample]
    if files:
        return _file_samples(url, sample, files)
    samples = _json_samples(url, sample)
    return samples | {"curl_stream": _curl_json(f"{url}/stream", sample, "-N ")} if pipeline.spec.stream else samples


def _json_samples(url: str, sample: dict[str, Any]) -> dict[str, str]:
    body = json.dumps(sample)
    return {
        "curl": _curl_json(url, sample),
        "javascript": (
            f"const response = await fetch({json.dumps(url)}, {{\n"
            f'  method: "POST",\n  headers: {{"Content-Type": "application/json"}},\n'
            f"  body: JSON.stringify({body}),\n}});\nconsole.log(await response.json());"
        ),
        "python": f"import httpx\n\nprint(httpx.post({url!r}, json={sample!r}).raise_for_status().json())",
    }


def _curl_json(url: str, sample: dict[str, Any], options: str = "") -> str:
    return f"curl {options}{url} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(sample))}"


def _file_samples(url: str, sample: dict[str, Any], files: list[str]) -> dict[str, str]:
    others = {name: value for name, value in sample.items() if name not in files}
    parts = [f"{name}=@{sample[name]}" for name in files] + [f"{name}={_part(value)}" for name, value in others.items()]
    opened = ", ".join(f"{name!r}: open({sample[name]!r}, 'rb')" for name in files)
    return {
        "curl": f"curl {url} " + " ".join(f"-F {shlex.quote(part)}" for part in parts),
        "javascript": (
            f"const form = new FormData();\nform.append({json.dumps(files[0])}, input.files[0]);\n"
            f'const response = await fetch({json.dumps(url)}, {{method: "POST", body: form}});\n'
            "console.log(await response.json());"
        ),
        "python": (
            f"import httpx\n\nfiles = {{{opened}}}\n"
            f"print(httpx.post({url!r}, files=files, data={others!r}).raise_for_status().json())"
        ),
    }


def _part(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
