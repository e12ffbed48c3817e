"""The OpenAPI document is valid, and the checked-in file is up to date."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.live.openapi_document import CHECKED_IN, document_at, settings_in
from tests.toolkit.keys import bearer
from tests.toolkit.processes import StartGateway


@pytest.fixture
def document(start_gateway: StartGateway, tmp_path: Path) -> dict[str, Any]:
    """The document of a gateway with only the reference ``gateway.yaml``, and with API keys."""
    return document_at(start_gateway(**settings_in(tmp_path)).url, bearer("everything"))


def test_the_checked_in_document_is_up_to_date(document: dict[str, Any]) -> None:
    assert json.loads(CHECKED_IN.read_text()) == document, "run `make openapi`"


def test_the_document_is_openapi_3_1(client: httpx.Client) -> None:
    """Validates the document of all pipelines of the test suite."""
    document = document_at(str(client.base_url).rstrip("/"))
    assert document["openapi"].startswith("3.1.")
    assert [str(error) for error in OpenAPIV31SpecValidator(document).iter_errors()] == []
