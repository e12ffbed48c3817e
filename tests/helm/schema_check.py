"""Kubernetes' own schemas, from the validator's wheel, and those of custom resources in ``custom_resources/``."""

from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

from tests.helm.rendering import Document

SCHEMAS = {
    path.stem: Draft202012Validator(yaml.safe_load(path.read_text()))
    for path in sorted((Path(__file__).parent / "custom_resources").glob("*.yaml"))
}
"""By kind."""


def custom_faults(document: Document) -> Iterator[str]:
    faults = SCHEMAS[document["kind"]].iter_errors(document)
    yield from (f"{document['kind']}: {fault.message}" for fault in faults)


def schema_faults(documents: list[Document], kubernetes: str) -> Iterator[str]:
    for document in documents:
        if document["kind"] in SCHEMAS:
            yield from custom_faults(document)
            continue
        try:
            kubernetes_validate.validate(document, kubernetes, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            yield f"{document['kind']} {document['apiVersion']} is unknown to Kubernetes {kubernetes}"
        except kubernetes_validate.ValidationError as error:
            yield f"{document['kind']}: {error.message}"
