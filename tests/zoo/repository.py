"""Writes the model repository and the ``gateway.yaml`` of the zoo."""

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.zoo.kinds import KINDS, Form, Kind, Step

SCRIPT = Path(__file__).parent / "model.py"
BATCHED = "_batch"
"""The suffix of the second pipeline of a model with batches, for lists of items."""
SILENCE_S = 300
"""A model that answers several long streams in turn is silent for a while on a busy machine."""


def write_models(folder: Path, kinds: Iterable[Kind]) -> None:
    for kind in kinds:
        (folder / kind.name / "1").mkdir(parents=True)
        (folder / kind.name / "config.pbtxt").write_text("\n".join(_config_of(kind)))
        if not kind.steps:
            (folder / kind.name / "1" / "model.py").symlink_to(SCRIPT)


def write_gateway_yaml(path: Path, kinds: Collection[Kind] = KINDS) -> None:
    pipelines = {name: document for kind in kinds for name, document in pipelines_of(kind).items()}
    oip = {"models": "all", "coalesce": [kind.name for kind in kinds if kind.sample]}
    path.write_text(yaml.safe_dump({"pipelines": pipelines, "oip": oip}, sort_keys=False))


def pipelines_of(kind: Kind) -> dict[str, Any]:
    """The pipelines of a kind: one for single items and, if the model has batches, one for lists of items."""
    document = {
        "model": kind.name,
        "inputs": {
            name: _field_of(kind, name) | ({"optional": True} if form.is_optional else {})
            for name, form in kind.input_forms.items()
        },
        "outputs": {name: _field_of(kind, name) for name in kind.output_forms},
        "stream": {"progress_s": SILENCE_S},
        **kind.pipeline,
    }
    batched = {key: value for key, value in document.items() if key != "openai"} | {"batch": True}
    if kind.sample:
        document |= {"idempotent": True, "coalesce": True, "sample": dict(kind.sample)}
    return {kind.name: document} | ({kind.name + BATCHED: batched} if kind.batch else {})


def _field_of(kind: Kind, name: str) -> dict[str, Any]:
    return {"tensor": name, "kind": kind.kind_of(name)} | ({"single": True} if name in kind.single else {})


def _config_of(kind: Kind) -> Iterator[str]:
    yield f'name: "{kind.name}"'
    yield f"max_batch_size: {kind.batch}"
    ragged = " allow_ragged_batch: true" if kind.config == "RAGGED" else ""
    yield from (f"input {{ {_tensor(name, form)}{ragged} }}" for name, form in kind.input_forms.items())
    yield from (f"output {{ {_tensor(name, form)} }}" for name, form in kind.output_forms.items())
    yield "dynamic_batching {}" if ragged else kind.config
    if kind.steps:
        yield 'platform: "ensemble"'
        yield f"ensemble_scheduling {{ {' '.join(map(_step, kind.steps))} }}"
        return
    yield 'backend: "python"'
    yield "instance_group [ { kind: KIND_CPU count: 1 } ]"
    if kind.is_decoupled:
        yield "model_transaction_policy { decoupled: true }"
    yield f'parameters {{ key: "zoo" value {{ string_value: {json.dumps(json.dumps(_row(kind)))} }} }}'


def _tensor(name: str, form: Form) -> str:
    datatype = "STRING" if form.datatype == "BYTES" else form.datatype
    dims = form.dims
    # Triton has no tensor without dimensions, but can take away a dimension of 1.
    shape = f"dims: {dims}" if dims else "dims: [1] reshape { shape: [] }"
    return f'name: "{name}" data_type: TYPE_{datatype} {shape}{" optional: true" if form.is_optional else ""}'


def _step(step: Step) -> str:
    maps = (("input_map", step.inputs), ("output_map", step.outputs))
    tensors = " ".join(
        f'{key}: {{ key: "{own}" value: "{shared}" }}' for key, names in maps for own, shared in names.items()
    )
    return f'step: {{ model_name: "{step.model}" model_version: -1 {tensors} }}'


def _row(kind: Kind) -> dict[str, Any]:
    return {
        "habit": kind.habit,
        "outputs": {
            name: {"sizes": form.sizes, "characters": form.characters, "raw": form.is_raw}
            for name, form in kind.output_forms.items()
        },
        "responses": kind.responses or (1, 1),
        "final": kind.final,
        "gaps": kind.gaps,
        "rows": kind.rows,
        "may_omit": kind.may_omit,
    }
