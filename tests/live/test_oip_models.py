"""Compares the documents of ``/v2`` about the server and its models with Triton's HTTP API, and checks the paths."""

from collections.abc import Iterator
from typing import Any

import pytest

from app import __version__
from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.conftest import GatewayProcess, StartGateway
from tests.live.side_by_side import Both, both_at

EXPOSED = ["typed_echo", "batched_echo", "repeat_text", "scripted", "scripted_chain", "text_generate", "ocr_bls"]
UNKNOWN_PATHS = [
    ("POST", "/v2/repository/models/scripted/load"),
    ("POST", "/v2/repository/models/scripted/unload"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("GET", "/v2/systemsharedmemory/region/a/status"),
    ("POST", "/v2/systemsharedmemory/region/a/register"),
    ("POST", "/v2/systemsharedmemory/unregister"),
    ("GET", "/v2/cudasharedmemory/status"),
    ("POST", "/v2/cudasharedmemory/region/a/register"),
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/trace/setting"),
    ("GET", "/v2/models/scripted/trace/setting"),
    ("POST", "/v2/models/scripted/trace/setting"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    ("GET", "/v2/models"),
    ("GET", "/v2/"),
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
@pytest.mark.parametrize("path", ["", "/versions/1"])
@pytest.mark.parametrize("document", ["", "/config"])
def test_metadata_and_configuration_match_triton(both: Both, model: str, path: str, document: str) -> None:
    theirs, ours = both.get(f"/v2/models/{model}{path}{document}")
    assert (theirs.status_code, ours.status_code) == (200, 200)
    assert known_to_triton(ours.json(), theirs.json()) == theirs.json()
    added = set(ours.json()) - set(theirs.json())
    assert not added, "the gateway adds fields to the message of Triton"


def test_statistics_match_triton(both: Both) -> None:
    theirs, ours = both.get("/v2/models/scripted_tail/stats")
    assert ours.json() == theirs.json()
    assert ours.json()["model_stats"][0]["name"] == "scripted_tail"


def test_statistics_of_all_models_include_only_exposed_models(both: Both) -> None:
    theirs, ours = both.get("/v2/models/stats")
    names = {each["name"] for each in ours.json()["model_stats"]}
    assert "scripted_chain" in names
    assert "stream_nested" not in names
    assert names < {each["name"] for each in theirs.json()["model_stats"]}


@pytest.mark.parametrize("body", [b"", b"{}", b'{"ready":true}'])
def test_the_index_lists_the_exposed_models(both: Both, body: bytes) -> None:
    theirs, ours = both.post("/v2/repository/index", body)
    rows = {row["name"]: row for row in ours.json()}
    assert set(EXPOSED) < set(rows)
    assert "stream_nested" not in rows
    assert all(row in theirs.json() for row in rows.values())


def test_a_malformed_index_request_is_400(both: Both) -> None:
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


@pytest.mark.parametrize("path", ["/v2/models/nope/ready", "/v2/models/scripted/versions/7/ready"])
def test_a_missing_model_or_version_is_not_ready(both: Both, path: str) -> None:
    theirs, ours = both.get(path)
    assert (theirs.status_code, theirs.json()) == (ours.status_code, ours.json())
    assert ours.json() == {"error": "Model version not ready"}


@pytest.mark.parametrize("document", ["", "/config"])
@pytest.mark.parametrize("model", ["nope", "scripted/versions/7", "scripted/versions/x"])
def test_unknown_models_and_versions_are_404(both: Both, model: str, document: str) -> None:
    theirs, ours = both.get(f"/v2/models/{model}{document}")
    assert (theirs.status_code, ours.status_code) == (404, 404)
    assert list(ours.json()) == ["error"]


@pytest.mark.parametrize("document", ["", "/config", "/stats", "/infer", "/generate", "/generate_stream"])
def test_a_model_that_is_not_exposed_is_unknown(both: Both, document: str) -> None:
    method = "POST" if document in {"/infer", "/generate", "/generate_stream"} else "GET"
    answer = both.gateway.request(method, f"/v2/models/stream_nested{document}", json={})
    assert answer.status_code == 404
    assert answer.json()["error"].startswith("Request for unknown model")


def test_server_metadata_has_the_name_and_the_extensions(both: Both) -> None:
    theirs, ours = both.get("/v2")
    assert ours.json().keys() == theirs.json().keys()
    assert (ours.json()["name"], ours.json()["version"]) == ("triton-gateway", __version__)
    assert {"binary_tensor_data", "classification", "parameters"} <= set(ours.json()["extensions"])


@pytest.mark.parametrize(("method", "path"), UNKNOWN_PATHS)
def test_administration_paths_are_404(both: Both, method: str, path: str) -> None:
    answer = both.gateway.request(method, path, json={})
    assert answer.status_code == 404
    assert list(answer.json()) == ["error"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/models/scripted/infer"),
        ("POST", "/v2/models/scripted"),
        ("GET", "/v2/repository/index"),
        ("DELETE", "/v2/health/live"),
    ],
)
def test_a_wrong_method_is_405_with_allow(both: Both, method: str, path: str) -> None:
    answer = both.gateway.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] in {"POST", "GET, HEAD"}
    assert list(answer.json()) == ["error"]


def test_without_a_file_every_ready_model_is_exposed(start_gateway: StartGateway) -> None:
    gateway = start_gateway()
    with both_at(gateway.url, gateway.url) as both:
        assert both.gateway.get("/v2/models/stream_nested/config").status_code == 200


def test_a_file_can_expose_all_models(start_gateway: StartGateway, tmp_path: Any) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("pipelines: {scripted: {model: scripted, warmup: false}}\noip: {models: all}\n")
    gateway = start_gateway(config=str(config))
    with both_at(gateway.url, gateway.url) as both:
        assert both.gateway.get("/v2/models/stream_nested/config").status_code == 200
        assert [each["name"] for each in both.gateway.get("/v1/pipelines").json()["pipelines"]] == ["scripted"]
