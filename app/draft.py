"""``triton-gateway init --triton``: writes a first ``gateway.yaml`` from the models of a running Triton.

A model that an ensemble runs as a step gets no pipeline of its own. What the configuration of a model cannot tell is
guessed from the names of its tensors, and marked with a comment. An LLM backend gets its preset. Each pipeline is
compiled before it is written.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from app.codecs.kinds import holds_bytes
from app.core.inference import BYTES
from app.core.model import ModelConfig, TensorSpec
from app.pipelines.llm_spec import recognized
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.pipeline import CompileContext, Pipeline
from app.pipelines.spec import RESERVED_NAMES, PipelineSpec

_KINDS = (
    ("image", re.compile(r"image|img|photo|picture|frame", re.IGNORECASE)),
    ("binary", re.compile(r"audio|wav|bytes|file|blob|video|pdf|encoded", re.IGNORECASE)),
    ("json", re.compile(r"json", re.IGNORECASE)),
)
_FILE = re.compile(r"encoded|jpe?g|png|bytes|blob|pdf|wav|mp[34]", re.IGNORECASE)
"""Names of tensors of 8-bit numbers that are files. ``image`` is not one of them: it may be an ``image_mask``."""
_GUESSED = "  # a guess"
_HEAD = """\
# Pipelines over the models that Triton has ready at {url}.
# A pipeline is one model or ensemble under a name of its own. Rename fields, and delete what callers should not use.
# A tensor of bytes (BYTES) is of kind text, image, binary or json. Only its name tells which, so check each guess.
# Numbers of 8 bits with the dims [-1] may be a file or a text too: kind image, binary or text.
# Every key: docs/reference/gateway-yaml.md. Check the file: triton-gateway check --triton {url} --config {path}
"""


class FileTaken(Exception):
    """The file exists already, or cannot be written."""


def write_draft(configs: Mapping[str, ModelConfig], url: str, path: Path) -> str:
    """Writes the file for the ready models and returns what to do next. Raises FileTaken."""
    if path.exists():
        raise FileTaken(f"{path} already exists: name another file, nothing was written.")
    steps = {step.model for config in configs.values() for step in config.steps}
    # The most readable first: ensembles, then models whose first input is a text.
    order = sorted(
        (not each.steps, [spec.datatype for spec in each.inputs[:1]] != [BYTES], each.name)
        for each in configs.values()
        if each.name not in steps
    )
    text, count = _HEAD.format(url=url, path=path) + "pipelines:\n", 0
    for *_, name in order:
        config, preset = configs[name], recognized(configs[name])
        keys: dict[str, Any] = {"model": name, "preset": preset}
        if preset is None:
            keys = {"model": name, "inputs": _fields_of(config.inputs), "outputs": _fields_of(config.outputs)}
            keys |= {"stream": True} if config.decoupled else {}
        problem = _problem_of(config, keys, configs)
        count += problem is None
        text += "".join(_lines_of(config, keys, problem))
    if not count:
        raise FileTaken(f"Triton at {url} has no ready model that a pipeline can call: nothing was written.")
    if steps:
        text += f"# Steps of ensembles, without a pipeline of their own: {', '.join(sorted(steps))}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as exc:
        raise FileTaken(f"{path} cannot be written: {exc.strerror or exc}.") from exc
    options = f"--triton {url} --config {shlex.quote(str(path))}"
    return (
        f"{path} has {count} pipeline{'s' * (count > 1)}. Read it, then:\n"
        f"  triton-gateway check {options}\n  triton-gateway serve {options}"
    )


def _fields_of(tensors: Iterable[TensorSpec]) -> dict[str, dict[str, Any]]:
    fields: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        name = re.sub(r"[^a-z0-9._-]", "_", tensor.name.lower()) or "value"
        while name in fields or name in RESERVED_NAMES or not re.match(r"[a-z0-9_]", name):
            name = f"_{name}"
        fields[name] = {"tensor": tensor.name}
        if tensor.datatype == BYTES:
            fields[name]["kind"] = next((kind for kind, names in _KINDS if names.search(tensor.name)), "text")
        elif holds_bytes(tensor) and _FILE.search(tensor.name):
            fields[name]["kind"] = "binary"
        if tensor.optional:
            fields[name]["optional"] = True
    return fields


def _problem_of(config: ModelConfig, keys: Mapping[str, Any], models: Mapping[str, ModelConfig]) -> str | None:
    """Why the gateway cannot serve such a pipeline, on one line; None if it can."""
    parts = (models.get(name) for name in (config.name, *config.calls))
    if any(each is not None and each.sequence is not None and not each.sequence.is_iterative for each in parts):
        return "the model runs requests only inside sequences, which pipelines do not have"
    try:
        Pipeline(config.name, PipelineSpec.model_validate(keys), config, models, CompileContext())
    except PipelineMismatch as exc:
        return " ".join(f"{'.'.join(map(str, exc.location))} {exc.text}".split())
    except ValueError as exc:
        return " ".join(str(exc).splitlines()[-1].split())
    return None


def _lines_of(config: ModelConfig, keys: Mapping[str, Any], problem: str | None) -> Iterator[str]:
    """The lines of one pipeline; as comments if it cannot be served."""
    mark = "  " if problem is None else "  # "
    what = f"an ensemble of {len(config.steps)} steps" if config.steps else config.backend or "a model"
    yield f"  # {config.name}: {what}{', decoupled: any number of responses' if config.decoupled else ''}\n"
    if problem is not None:
        yield f"  # The gateway cannot serve it like this: {problem}\n"
    yield f"{mark}{_scalar(config.name)}:\n"
    yield f"{mark}  model: {_scalar(config.name)}\n"
    if "preset" in keys:
        yield f"{mark}  preset: {keys['preset']}  # by its tensors; for chats openai: {{chat: {{tokenizer: DIR}}}}\n"
    for section in ("inputs", "outputs"):
        if keys.get(section):
            yield f"{mark}  {section}:\n"
        for name, field in keys.get(section, {}).items():
            values = ", ".join(f"{key}: {_scalar(value)}" for key, value in field.items())
            yield f"{mark}    {_scalar(name)}: {{{values}}}{_GUESSED if 'kind' in field else ''}\n"
    if keys.get("stream"):
        yield f"{mark}  stream: true\n"


def _scalar(value: Any) -> str:
    """The YAML of a name, a number or a truth value, in quotes where YAML needs them."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).partition("\n")[0]
