"""The statistics of the pipelines, and the findings of the linter, for all callers and for keys with a scope."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from app.core.errors import ModelError, UpstreamUnavailable
from tests.api.conftest import FINAL, PNG, READER, WRITER, word
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, served
from tests.toolkit.keys import bearer, entry, write_keys

FAULTY = """
pipelines:
  read: {model: reader, outputs: {text: {tensor: TEXT, kind: text}}, sample: {nonsense: 1}, warmup: false}
  write: {model: writer, outputs: {text: {tensor: TEXT, kind: text}}, stream: true, sample: {gone: 1}, warmup: false}
  lost: {model: typo, outputs: {text: {tensor: TEXT}}}
oip: {models: [absent]}
"""


def check_described(document: dict[str, Any], path: str, answer: Any) -> None:
    schema = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator(document | schema).validate(answer)


class TestStatistics:
    async def test_requests_are_counted_by_pipeline_transport_and_outcome(self, api: Served) -> None:
        await api.client.post("/v1/pipelines/read", files={"image": PNG})
        await api.client.post("/v1/pipelines/read", json={})
        api.engine.answers = [word(b"a", 1), FINAL]
        await api.client.post("/v1/pipelines/write/stream", json={"prompt": "x"})
        answer = (await api.client.get("/v1/statistics")).json()
        read, write = answer["pipelines"]["read"], answer["pipelines"]["write"]
        assert read["unary"]["outcomes"] == {"ok": 1, "client_error": 1}
        assert write["stream"]["outcomes"] == {"ok": 1}
        assert write["unary"] == {"outcomes": {}, "durations": [0] * 19}
        check_described((await api.client.get("/openapi.json")).json(), "/v1/statistics", answer)

    async def test_durations_are_those_of_answered_requests(self, api: Served) -> None:
        await api.client.post("/v1/pipelines/read", files={"image": PNG})
        api.engine.answers = [ModelError("no")]
        await api.client.post("/v1/pipelines/read", files={"image": PNG})
        answer = (await api.client.get("/v1/statistics")).json()
        durations = answer["pipelines"]["read"]["unary"]["durations"]
        assert len(durations) == len(answer["bounds_s"]) + 1
        assert durations == sorted(durations)
        assert durations[-1] == 1

    async def test_many_pages_cost_as_much_as_one(self, api: Served) -> None:
        first = (await api.client.get("/v1/statistics")).json()
        await api.client.post("/v1/pipelines/read", files={"image": PNG})
        assert (await api.client.get("/v1/statistics")).json() == first

    async def test_a_key_with_a_scope_sees_its_pipelines(self, tmp_path: Path) -> None:
        keys = write_keys(tmp_path / "keys.yaml", entry("all"), entry("reads", pipelines=["read"]))
        (tmp_path / "gateway.yaml").write_text(FAULTY)
        async with served(FakeEngine.of(READER, WRITER), tmp_path / "gateway.yaml", keys=keys) as api:
            for key, names in (("all", ["read", "write", "lost"]), ("reads", ["read"])):
                answer = (await api.client.get("/v1/statistics", headers=bearer(key))).json()
                assert list(answer["pipelines"]) == names


class TestFindings:
    @pytest.fixture
    async def faulty(self, tmp_path: Path) -> AsyncIterator[Served]:
        (tmp_path / "gateway.yaml").write_text(FAULTY)
        scopes = [entry("all"), entry("reads", pipelines=["read"]), entry("none", pipelines=["later"])]
        scopes.append(entry("loses", pipelines=["lost"]))
        keys = write_keys(tmp_path / "keys.yaml", *scopes)
        async with served(FakeEngine.of(READER, WRITER), tmp_path / "gateway.yaml", keys=keys) as api:
            yield api

    async def found(self, api: Served, key: str) -> list[dict[str, Any]]:
        answer = await api.client.get("/v1/findings", headers=bearer(key))
        document = (await api.client.get("/openapi.json", headers=bearer(key))).json()
        check_described(document, "/v1/findings", answer.json())
        return list(answer.json()["findings"])

    async def test_each_says_where_and_what(self, faulty: Served) -> None:
        found = await self.found(faulty, "all")
        assert {(each["code"], each["pipeline"]) for each in found if each["code"] == "sample"} == {
            ("sample", "read"),
            ("sample", "write"),
        }
        (sample,) = [each for each in found if each["pipeline"] == "read"]
        assert sample["severity"] == "error"
        assert sample["text"].startswith("gateway.yaml:3: pipelines.read.sample.nonsense is not a field")
        assert sample["solution"].startswith("Correct the line that the finding names.")
        assert [each["model"] for each in found if each["code"] == "gateway-yaml"] == ["typo", "absent"]

    async def test_a_key_with_a_scope_sees_those_of_its_pipelines(self, faulty: Served) -> None:
        reads = await self.found(faulty, "reads")
        assert reads
        assert {each["pipeline"] or each["model"] for each in reads} <= {"read", "reader"}
        assert await self.found(faulty, "none") == []

    async def test_a_key_with_a_scope_reads_no_names_of_other_models(self, faulty: Served) -> None:
        texts = {key: (await self.found(faulty, key))[-1]["text"] for key in ("loses", "all")}
        assert texts["loses"].endswith("'typo' is not a model in the repository")
        assert texts["all"].endswith("'absent' is not a model in the repository; valid here: reader, writer")

    async def test_triton_is_not_asked_again_at_once(self, faulty: Served) -> None:
        before = await self.found(faulty, "all")
        faulty.engine.is_up = False
        assert await self.found(faulty, "all") == before

    async def test_without_triton_it_is_503(self, api: Served) -> None:
        api.engine.is_up = False
        answer = await api.client.get("/v1/findings")
        assert (answer.status_code, answer.json()["code"]) == (503, UpstreamUnavailable.code)
