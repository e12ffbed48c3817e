"""The declared requests of a pipeline, as bodies with their files."""

from pathlib import Path

import orjson
import pytest

from app.pipelines.examples import body_of, declared_requests, paths_in
from tests.toolkit.models import model, pipeline

FIELDS = {"image": {"tensor": "F", "kind": "image"}, "note": {"tensor": "T", "kind": "text", "optional": True}}
READER = model(["F BYTES [1]", "T BYTES [1] optional"], name="reader")
VALUES = {"image": "pictures/a.png", "note": "pictures/a.png"}


def test_the_sample_is_the_first_of_the_declared_requests() -> None:
    examples = {"second": {"image": "b.png"}, "first": {"image": "c.png"}}
    spec = pipeline(READER, inputs=FIELDS, sample=VALUES, examples=examples).spec
    assert list(declared_requests(spec).items()) == [("sample", VALUES), *examples.items()]
    assert declared_requests(pipeline(READER, inputs=FIELDS, examples=examples).spec) == examples


def test_only_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\0\1")
    found = pipeline(READER, inputs=FIELDS)
    assert paths_in(found, VALUES) == {"image": "pictures/a.png"}
    assert orjson.loads(body_of(found, VALUES, tmp_path)) == {"image": "AAE=", "note": "pictures/a.png"}


def test_a_file_above_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"1234")
    found = pipeline(READER, inputs=FIELDS)
    assert body_of(found, {"image": "a.png"}, tmp_path, 4)
    with pytest.raises(OSError, match="larger than 3 bytes"):
        body_of(found, {"image": "a.png"}, tmp_path, 3)
