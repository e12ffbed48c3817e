"""The answers of ``GET /v1/pipelines``: fields, types, limits, the model, and samples that work as pasted."""

from collections.abc import Callable
from typing import Any

from app.api.pipelines.graphs import graph_described
from app.api.pipelines.samples import samples_of
from app.pipelines.declared import declared_requests, paths_in
from app.pipelines.entry import Entry
from app.pipelines.example import Filled, example_of
from app.pipelines.fields import InputField, ParameterField
from app.pipelines.outputs import OutputField
from app.pipelines.pipeline import Pipeline
from app.pipelines.schema import event_schema, request_schema, result_schema


def summarize(name: str, entry: Entry) -> dict[str, Any]:
    return {
        "name": name,
        "description": entry.spec.description,
        "model": entry.spec.model,
        "state": entry.state,
        "state_detail": entry.state_detail,
        "streams": entry.spec.stream is not None,
        "url": f"/v1/pipelines/{name}",
    }


def describe(
    name: str, entry: Entry, load_limits: Callable[[Pipeline], dict[str, Any]], base_url: str, *, with_key: bool = False
) -> dict[str, Any]:
    """For a pipeline that is not compiled yet, returns only the file's content and the reason why it is not ready.

    ``base_url``, ``with_key``: see ``samples_of``.
    """
    summary, pipeline = summarize(name, entry), entry.pipeline
    if pipeline is None:
        return summary
    samples = samples_of(pipeline, base_url, with_key=with_key)
    return summary | _compiled(pipeline, load_limits(pipeline)) | {"samples": samples}


def _compiled(pipeline: Pipeline, load_limits: dict[str, Any]) -> dict[str, Any]:
    spec, config = pipeline.spec, pipeline.config
    return {
        "version": spec.version or None,
        "decoupled": config.decoupled,
        "inputs": [_input(field) for field in pipeline.inputs],
        "parameters": [_parameter(field) for field in pipeline.parameters],
        "outputs": [{**_field(field), "join": field.join if config.decoupled else None} for field in pipeline.outputs],
        "graph": graph_described(pipeline),
        "early_exit": list(dict.fromkeys(rule.reason for rule in spec.early_exit)),
        "limits": {
            "timeout_s": pipeline.timeout_s,
            **load_limits,
            **({"stream": spec.stream.model_dump()} if spec.stream is not None else {}),
        },
        "schemas": {
            "request": request_schema(pipeline),
            "result": result_schema(pipeline),
            "output_event": event_schema(pipeline) if spec.stream is not None else None,
        },
        "sample": _sample(pipeline),
        "examples": [
            {"name": name, "files": paths_in(pipeline, values)} for name, values in declared_requests(spec).items()
        ],
    }


def _sample(pipeline: Pipeline) -> dict[str, Any]:
    """The initial values of a form, without files and long lists."""
    files = {field.name for field in pipeline.inputs if field.is_file}
    values = example_of(pipeline).items()
    return {name: value for name, value in values if name not in files and not isinstance(value, Filled)}


def _input(field: InputField) -> dict[str, Any]:
    return {**_field(field), "required": field.is_required, "default": field.spec.default}


def _parameter(field: ParameterField) -> dict[str, Any]:
    return {"name": field.name, "required": field.is_required, **field.spec.model_dump(exclude_none=True)}


def _field(field: InputField | OutputField) -> dict[str, Any]:
    return {
        "name": field.name,
        "kind": field.spec.kind,
        "tensor": field.tensor.name,
        "datatype": field.tensor.datatype,
        "shape": field.tensor.dims,
    }
