"""Kubernetes' own schemas, from the validator's wheel."""

from collections.abc import Iterator

import kubernetes_validate

from tests.helm.rendering import Document

CUSTOM = {"HTTPRoute", "PodMonitor", "PrometheusRule"}
"""Kinds whose schemas come with their operators; their shape is checked by the tests about them."""


def schema_faults(documents: list[Document], kubernetes: str) -> Iterator[str]:
    for document in documents:
        try:
            kubernetes_validate.validate(document, kubernetes, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            if document["kind"] not in CUSTOM:
                yield f"{document['kind']} {document['apiVersion']} is unknown to Kubernetes {kubernetes}"
        except kubernetes_validate.ValidationError as error:
            yield f"{document['kind']}: {error.message}"
