"""Compares the documents of ``/v2`` about the server and its models with Triton's HTTP API, and checks the paths."""

from collections.abc import Iterator
from typing import Any

import pytest

from app import __version__
from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.side_by_side import Both, both_at
from tests.toolkit.processes import GatewayProcess

EXPOSED = ["typed_echo", "batched_echo", "repeat_text", "scripted", "scripted_chain", "text_generate", "ocr_bls"]
SHARED_MEMORY = ("/status", "/region/a/status", "/region/a/register", "/unregister")
ADMINISTRATION = [
    *(f"/v2/repository/models/scripted/{change}" for change in ("load", "unload")),
    *(f"/v2/{kind}sharedmemory{end}" for kind in ("system", "cuda") for end in SHARED_MEMORY),
    *("/v2/trace/setting", "/v2/models/scripted/trace/setting", "/v2/logging", "/v2/models", "/v2/"),
]


@pytest.fixture(scope="module")
def both(triton: EmbeddedTriton, gateway: GatewayProcess) -> Iterator[Both]:
    with both_at(triton.http_url, gateway.url) as clients:
        yield clients


def known_to_triton(ours: Any, theirs: Any) -> Any:
    """Returns ``ours`` without the fields that Triton 2.51 does not have: the client library has newer messages."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return {key: known_to_triton(ours[key], theirs[key]) for key in ours if key in theirs}
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [known_to_triton(one, other) for one, other in zip(ours, theirs, strict=True)]
    return ours


@pytest.mark.parametrize("model", EXPOSED)
def test_metadata_and_configuration_match_triton(both: Both, model: str) -> None:
    for path in ("", "/config", "/versions/1", "/versions/1/config"):
        theirs, ours = both.get(f"/v2/models/{model}{path}")
        assert (theirs.status_code, ours.status_code) == (200, 200)
        assert known_to_triton(ours.json(), theirs.json()) == theirs.json()
        added = set(ours.json()) - set(theirs.json())
        assert not added, "the gateway adds fields to the message of Triton"


def test_statistics_match_triton_and_include_only_exposed_models(both: Both) -> None:
    theirs, ours = both.get("/v2/models/scripted_tail/stats")
    assert ours.json() == theirs.json()
    assert ours.json()["model_stats"][0]["name"] == "scripted_tail"
    theirs, ours = both.get("/v2/models/stats")
    names = {each["name"] for each in ours.json()["model_stats"]}
    assert "scripted_chain" in names
    assert "stream_nested" not in names
    assert names < {each["name"] for each in theirs.json()["model_stats"]}


def test_the_index_lists_the_exposed_models(both: Both) -> None:
    for body in (b"", b"{}", b'{"ready":true}'):
        theirs, ours = both.post("/v2/repository/index", body)
        rows = {row["name"]: row for row in ours.json()}
        assert set(EXPOSED) < set(rows)
        assert "stream_nested" not in rows
        assert all(row in theirs.json() for row in rows.values())
    assert [answer.status_code for answer in both.post("/v2/repository/index", b"[1")] == [500, 400]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        ("/v2/models/scripted/ready", {"name": "scripted", "ready": True}),
        ("/v2/models/scripted/versions/1/ready", {"name": "scripted", "ready": True}),
    ],
)
def test_health_is_200_with_the_body_that_kserve_reads(both: Both, path: str, body: dict[str, Any]) -> None:
    theirs, ours = both.get(path)
    assert (theirs.status_code, ours.status_code) == (200, 200)
    assert (theirs.content, ours.json()) == (b"", body)


def test_unknown_models_and_versions_are_404(both: Both) -> None:
    for path in ("/v2/models/nope/ready", "/v2/models/scripted/versions/7/ready"):
        theirs, ours = both.get(path)
        assert (theirs.status_code, theirs.json()) == (ours.status_code, ours.json())
        assert ours.json() == {"error": "Model version not ready"}
    for model in ("nope", "scripted/versions/7", "scripted/versions/x"):
        for document in ("", "/config"):
            theirs, ours = both.get(f"/v2/models/{model}{document}")
            assert (theirs.status_code, ours.status_code) == (404, 404)
            assert model.endswith("x") or ours.json() == theirs.json()
    for document in ("", "/config", "/stats", "/infer", "/generate", "/generate_stream"):
        method = "POST" if document in {"/infer", "/generate", "/generate_stream"} else "GET"
        answer = both.gateway.request(method, f"/v2/models/stream_nested{document}", json={})
        assert answer.status_code == 404
        assert answer.json()["error"].startswith("Request for unknown model"), "it is not exposed"


def test_server_metadata_has_the_name_and_the_extensions(both: Both) -> None:
    theirs, ours = both.get("/v2")
    assert ours.json().keys() == theirs.json().keys()
    assert (ours.json()["name"], ours.json()["version"]) == ("triton-gateway", __version__)
    assert {"binary_tensor_data", "classification", "parameters"} <= set(ours.json()["extensions"])


def test_administration_paths_are_404(both: Both) -> None:
    for path in ADMINISTRATION:
        for method in ("GET", "POST"):
            answer = both.gateway.request(method, path, json={})
            assert answer.status_code == 404, (method, path)
            assert list(answer.json()) == ["error"]
