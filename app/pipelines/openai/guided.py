"""Guided decoding: the fields of a pipeline that hold the model's answer to a JSON schema."""

from collections.abc import Mapping
from typing import Any

from app.core.json import json_of
from app.pipelines.openai.mapping import TextForm


def guided_fields(form: TextForm, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the pipeline's fields by name; empty if the model cannot be guided."""
    guided = form.guided
    if guided is None:
        return {}
    value = json_of(schema).decode() if guided.member is None else {guided.member: schema}
    return {guided.parameter: value, **guided.also}
