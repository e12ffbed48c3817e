from pathlib import Path

import pytest

from app.core.model import RepositoryModel
from app.triton.repository import RepositoryUnreadable, read_repository
from tests.toolkit.broken_repositories import Repository

CALL = "pb_utils.InferenceRequest(model_name={}, inputs=[])"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    repository = Repository(tmp_path)
    repository.model("ident", "X", "Y")
    return repository


def only(path: Path) -> RepositoryModel:
    (model,) = read_repository(path)
    return model


def test_a_configuration_without_a_name_uses_its_folder(repository: Repository) -> None:
    config = repository.path / "ident" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "ident"', ""))
    assert only(repository.path).config.name == "ident"


def test_a_model_without_a_configuration_has_no_complaint(repository: Repository) -> None:
    (repository.path / "ident" / "config.pbtxt").unlink()
    model = only(repository.path)
    assert (model.config.inputs, model.complaint) == ((), "")


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ("", ("12",)),
        ("latest { num_versions: 2 }", ("12", "3")),
        ("specific { versions: [ 1, 3, 7 ] }", ("1", "3")),
        ("all { }", ("1", "12", "3")),
    ],
)
def test_versions_are_those_that_the_policy_loads(repository: Repository, policy: str, versions: tuple[str]) -> None:
    for name in ("12", "3", "04", "samples", "__pycache__"):
        (repository.path / "ident" / name).mkdir()
    config = repository.path / "ident" / "config.pbtxt"
    config.write_text(config.read_text() + (f"version_policy {{ {policy} }}" if policy else ""))
    assert only(repository.path).versions == versions


def test_the_error_for_an_invalid_configuration_has_the_line(repository: Repository) -> None:
    (repository.path / "ident" / "config.pbtxt").write_text("name: 7")
    config = repository.path / "ident" / "config.pbtxt"
    assert only(repository.path).complaint.startswith(f"{config}:1:7")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("input { data_type: TYPE_FLOAT32 }", "no value named TYPE_FLOAT32; did you mean 'TYPE_FP32'?"),
        ("input { data_type: TYPE_BYTES }", "no value named TYPE_BYTES; did you mean 'TYPE_STRING'?"),
        ("input { data_type: TYPE_FP23 }", "no value named TYPE_FP23; did you mean 'TYPE_FP32'?"),
        ("inputs { }", "no field named \"inputs\"; did you mean 'input'?"),
        ("instance_group { kind: KIND_CPUS }", "did you mean 'KIND_CPU'?"),
        ("ensemble_scheduling { step { model: 1 } }", "did you mean 'model_name'?"),
    ],
)
def test_a_mistyped_name_gets_a_suggestion(repository: Repository, config: str, expected: str) -> None:
    (repository.path / "ident" / "config.pbtxt").write_text(config)
    assert only(repository.path).complaint.endswith(expected)


def test_the_error_for_an_unreadable_file_has_its_path(repository: Repository) -> None:
    config = repository.path / "ident" / "config.pbtxt"
    config.unlink()
    config.symlink_to("absent")
    assert only(repository.path).complaint == f"{config} cannot be read: No such file or directory"
    config.unlink()
    config.write_bytes(b"\xff")
    assert only(repository.path).complaint == f"{config} cannot be read: it is not UTF-8 text"


@pytest.mark.parametrize(
    ("script", "calls"),
    [
        (CALL.format('"ocr"'), {"ocr"}),
        (CALL.format('"ocr"').replace("pb_utils.", ""), {"ocr"}),
        (CALL.format("name"), set()),
        ("def broken(:", set()),
        ("requests = [1]", set()),
    ],
)
def test_a_scripts_literal_calls_are_found(repository: Repository, script: str, calls: set[str]) -> None:
    (repository.path / "ident" / "1" / "model.py").write_text(script)
    assert only(repository.path).calls == calls


def test_declared_calls_are_found(repository: Repository) -> None:
    config = repository.path / "ident" / "config.pbtxt"
    config.write_text(config.read_text() + 'parameters { key: "bls_calls" value { string_value: "a , b," } }')
    assert only(repository.path).calls == {"a", "b"}


def test_instances_on_several_gpus_are_counted(repository: Repository) -> None:
    config = repository.path / "ident" / "config.pbtxt"
    config.write_text(config.read_text() + "instance_group [ { kind: KIND_GPU count: 2 gpus: [ 0, 1 ] } ]")
    assert only(repository.path).config.instance_count == 4


def test_a_missing_or_empty_repository_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(RepositoryUnreadable, match="no model repository"):
        read_repository(tmp_path / "absent")
    with pytest.raises(RepositoryUnreadable, match="contains no models"):
        read_repository(tmp_path)
