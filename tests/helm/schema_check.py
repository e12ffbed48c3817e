"""Kubernetes' own schemas, from the validator's wheel, and those of custom resources in ``custom_resources/``."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from kubernetes_validate import utils
from referencing import Registry, Resource

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
            validator = validator_of(document["kind"], document["apiVersion"], kubernetes)
        except FileNotFoundError:
            yield f"{document['kind']} {document['apiVersion']} is unknown to Kubernetes {kubernetes}"
            continue
        if (error := best_match(validator.iter_errors(document))) is not None:
            yield f"{document['kind']}: {error.message}"


@cache
def validator_of(kind: str, api_version: str, kubernetes: str) -> Draft202012Validator:
    """What ``kubernetes_validate.validate`` makes again for each document. Raises FileNotFoundError."""
    group_and_version = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = _schema(f"{kind.lower()}-{group_and_version}", kubernetes)
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(kubernetes))


@cache
def _definitions(kubernetes: str) -> Registry:
    return (Resource.from_contents(_schema("_definitions", kubernetes)) @ Registry()).crawl()


def _schema(name: str, kubernetes: str) -> Document:
    (release,) = {each for each in utils.all_versions() if utils.major_minor(each) == kubernetes}
    schema: Document = utils.schema_contents(f"kubernetes-json-schema/v{release}-local-strict/{name}.json", release)
    return schema
