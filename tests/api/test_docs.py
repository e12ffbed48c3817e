"""The documentation that the gateway serves: descriptions, samples, OpenAPI, error pages."""

import shlex
import subprocess
from html.parser import HTMLParser
from typing import Any

import jsonschema
import pytest

from app.api.error_table import ERROR_BY_CODE, ROW_BY_ERROR
from app.api.pipelines.samples import samples_of
from tests.api.conftest import word
from tests.toolkit.gateway import Served
from tests.toolkit.models import model, pipeline


def refs_of(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [ref for inner in value.values() for ref in refs_of(inner)]
    return [ref for inner in value for ref in refs_of(inner)] if isinstance(value, list) else []


class TestDescriptions:
    async def test_the_list_has_names_and_states(self, api: Served) -> None:
        listed = (await api.client.get("/v1/pipelines")).json()["pipelines"]
        assert [(each["name"], each["state"], each["streams"]) for each in listed] == [
            ("read", "ready", False),
            ("write", "ready", True),
        ]

    async def test_a_pipeline_describes_its_fields(self, api: Served) -> None:
        description = (await api.client.get("/v1/pipelines/read")).json()
        assert description["inputs"][0] == {
            "name": "image",
            "description": "",
            "kind": "image",
            "tensor": "IMAGE",
            "datatype": "BYTES",
            "shape": [1],
            "required": True,
            "default": None,
        }
        assert description["parameters"][0] == {
            "name": "n",
            "required": False,
            "type": "integer",
            "minimum": 1,
            "maximum": 9,
            "default": 3,
            "optional": False,
            "description": "",
        }
        assert [output["join"] for output in description["outputs"]] == [None, None]
        assert description["early_exit"] == ["no_text"]
        assert description["schemas"]["output_event"] is None
        streaming = (await api.client.get("/v1/pipelines/write")).json()
        assert [output["join"] for output in streaming["outputs"]] == ["concatenate", "list"]
        assert streaming["limits"]["stream"]["progress_s"] == 5

    async def test_schemas_of_a_pipeline_are_valid(self, api: Served) -> None:
        for name in ("read", "write"):
            schemas = (await api.client.get(f"/v1/pipelines/{name}")).json()["schemas"]
            for schema in filter(None, schemas.values()):
                jsonschema.Draft202012Validator.check_schema(schema)
                assert refs_of(schema) == []


class TestSamples:
    async def test_the_curl_sample_works_with_quotes_in_the_body(self, api: Served) -> None:
        api.engine.answers = [word(b"a", 1)]
        sample = (await api.client.get("/v1/pipelines/write")).json()["samples"]["curl"]
        curl, url, _, header, _, body = shlex.split(sample)
        name, _, value = header.partition(": ")
        answer = await api.client.post(url, content=body.encode(), headers={name: value})
        assert (curl, answer.status_code) == ("curl", 200)
        assert api.engine.requests[0].inputs[0].array.tolist() == [b"It's <here> & now"]

    async def test_a_stream_has_a_curl_sample(self, api: Served) -> None:
        samples = (await api.client.get("/v1/pipelines/write")).json()["samples"]
        assert shlex.split(samples["curl_stream"])[:3] == ["curl", "-N", "http://gateway/v1/pipelines/write/stream"]

    async def test_a_file_is_sent_as_a_form_part(self, api: Served) -> None:
        samples = (await api.client.get("/v1/pipelines/read")).json()["samples"]
        assert shlex.split(samples["curl"]) == ["curl", "http://gateway/v1/pipelines/read", "-F", "image=@sample.png"]
        assert samples.keys() == {"curl", "javascript", "python"}

    @pytest.mark.parametrize("name", ["read", "write"])
    async def test_the_python_sample_compiles(self, api: Served, name: str) -> None:
        compile((await api.client.get(f"/v1/pipelines/{name}")).json()["samples"]["python"], "sample", "exec")

    @pytest.mark.parametrize(
        "host", ["x;$(touch pwned)", "x`id`", 'x"+alert(1)+"', "x'", "x y", "[", "a/b", "x:y", "", "-"]
    )
    async def test_an_invalid_host_is_not_repeated(self, api: Served, host: str) -> None:
        answer = await api.client.get("/v1/pipelines/write", headers={"Host": host})
        expected = "http://-/" if host == "-" else "http://gateway:None/"
        assert answer.status_code == 200
        assert shlex.split(answer.json()["samples"]["curl"])[1] == f"{expected}v1/pipelines/write"

    @pytest.mark.parametrize("host", ["gateway.example", "127.0.0.1:8080", "[::1]:8080"])
    async def test_samples_use_the_host_of_the_request(self, api: Served, host: str) -> None:
        samples = (await api.client.get("/v1/pipelines/write", headers={"Host": host})).json()["samples"]
        assert shlex.split(samples["curl"])[1] == f"http://{host}/v1/pipelines/write"
        assert f'fetch("http://{host}/v1/pipelines/write"' in samples["javascript"]
        assert f"post('http://{host}/v1/pipelines/write'" in samples["python"]


FILES = pipeline(
    model(["A BYTES [1]", "B BYTES [1]", "T BYTES [1]", "N FP32 [2]"]),
    inputs={
        "a": {"tensor": "A", "kind": "image"},
        "b": {"tensor": "B", "kind": "binary"},
        "t": {"tensor": "T", "kind": "text"},
        "n": {"tensor": "N"},
    },
    sample={"a": "an image; type=x.png", "b": "b.bin", "t": "@/etc/passwd'", "n": [0.5, 1]},
)
LARGE = pipeline(model("N FP32 [3,200]"), inputs={"n": {"tensor": "N", "minimum": 1}})


class TestSamplesOfOtherPipelines:
    def test_samples_send_every_field_and_read_only_declared_files(self) -> None:
        samples = samples_of(FILES, "http://x")
        assert shlex.split(samples["curl"])[2:] == [
            *("-F", 'a=@"an image; type=x.png"', "-F", "b=@b.bin"),
            *("--form-string", "t=@/etc/passwd'", "--form-string", "n=[0.5, 1]"),
        ]
        for line in (
            '"a", await openAsBlob("an image; type=x.png")',
            '"b", await openAsBlob("b.bin")',
            '"n", "[0.5, 1]"',
        ):
            assert f"form.append({line}" in samples["javascript"]
        assert "files={'a': open('an image; type=x.png', 'rb'), 'b': open('b.bin', 'rb')}" in samples["python"]

    def test_a_large_tensor_is_written_as_an_expression(self) -> None:
        samples = samples_of(LARGE, "http://x")
        assert max(map(len, samples.values())) < 300
        command, _, call = samples["curl"].partition(" | ")
        done = subprocess.run(shlex.split(command), capture_output=True, check=True)
        assert LARGE.request_of_json(done.stdout).inputs[0].shape == (3, 200)
        assert call.endswith(" -d @-")
        assert 'JSON.stringify({"n": Array(3).fill(Array(200).fill(1))})' in samples["javascript"]


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if name in {"href", "src"} and value]


class TestPages:
    @pytest.mark.parametrize("code", sorted(ERROR_BY_CODE))
    async def test_every_error_has_a_page(self, api: Served, code: str) -> None:
        answer = await api.client.get(f"/docs/errors/{code}")
        assert answer.status_code == 200
        assert code in answer.text
        assert str(ROW_BY_ERROR[ERROR_BY_CODE[code]].status) in answer.text

    async def test_the_list_of_errors_links_every_error(self, api: Served) -> None:
        page = Page()
        page.feed((await api.client.get("/docs/errors")).text)
        listed = {address for address in page.addresses if address.startswith("/docs/errors/")}
        assert listed == {f"/docs/errors/{code}" for code in ERROR_BY_CODE}

    @pytest.mark.parametrize("path", ["/docs", "/docs/errors"])
    async def test_the_documentation_needs_no_internet(self, api: Served, path: str) -> None:
        page = Page()
        page.feed((await api.client.get(path)).text)
        assert "/docs/assets/colours.css" in page.addresses
        assert not [address for address in page.addresses if "//" in address]
        for address in page.addresses:
            if not address.startswith("data:"):
                assert (await api.client.get(address)).status_code == 200
