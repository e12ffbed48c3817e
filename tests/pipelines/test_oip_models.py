"""The models that callers may address by name, while gateway.yaml and Triton change."""

from pathlib import Path

import pytest

from app.core.errors import ModelNotReady, UnknownModel
from app.pipelines.catalog import Catalog
from app.pipelines.spec import CancelSpec
from tests.toolkit.engine import FakeEngine
from tests.toolkit.models import model

PIPELINE = "pipelines: {p: {model: a, warmup: false}}\n"


async def catalog_of(folder: Path, oip: str) -> Catalog:
    (folder / "gateway.yaml").write_text(PIPELINE + oip)
    engine = FakeEngine.of(*(model("X FP32 [1]", "Y FP32 [1]", name=name) for name in "abc"))
    catalog = Catalog(engine, folder / "gateway.yaml")
    catalog.load_file()
    await catalog.refresh()
    return catalog


@pytest.mark.parametrize(
    ("oip", "exposed"),
    [("", "a"), ("oip: {}", "a"), ("oip: {models: [c]}", "ac"), ("oip: {models: all}", "abc")],
)
async def test_models_of_pipelines_and_of_the_key_oip_are_exposed(tmp_path: Path, oip: str, exposed: str) -> None:
    catalog = await catalog_of(tmp_path, oip)
    assert "".join(catalog.oip_models.names) == exposed
    assert [catalog.oip_models.model(name).config.name for name in exposed] == list(exposed)
    with pytest.raises(UnknownModel):
        catalog.oip_models.model("d")


async def test_requests_follow_the_pipelines_over_their_model(tmp_path: Path) -> None:
    cancel = "idempotent: true, cancel: {model: b, input: X}"
    (tmp_path / "gateway.yaml").write_text(PIPELINE.replace("warmup: false", cancel) + "oip: {models: [c]}")
    engine = FakeEngine.of(*(model("X FP32 [1]", "Y FP32 [1]", name=name) for name in "abc"))
    catalog = Catalog(engine, tmp_path / "gateway.yaml")
    catalog.load_file()
    await catalog.refresh()
    rules = catalog.oip_models.model("a")
    assert (rules.idempotent, rules.cancel) == (True, CancelSpec(model="b", input="X"))
    rules = catalog.oip_models.model("c")
    assert (rules.idempotent, rules.cancel) == (False, None)


async def test_a_changed_file_changes_the_exposed_models(tmp_path: Path) -> None:
    catalog = await catalog_of(tmp_path, "oip: {models: [c]}")
    (tmp_path / "gateway.yaml").write_text(PIPELINE + "oip: {models: [b]}")
    await catalog.follow_file()
    with pytest.raises(ModelNotReady):
        catalog.oip_models.model("b")  # until the next read of Triton's models
    await catalog.follow_models()
    assert catalog.oip_models.model("b").config.name == "b"
    assert "c" not in catalog.oip_models


async def test_a_configuration_stays_the_same_object_until_it_changes(tmp_path: Path) -> None:
    catalog = await catalog_of(tmp_path, "")
    known = catalog.oip_models.model("a").config
    engine = catalog.engine
    assert isinstance(engine, FakeEngine)
    engine.configs["a"] = model("X FP32 [1]", "Y FP32 [1]", name="a")
    await catalog.follow_models()
    assert catalog.oip_models.model("a").config is known
    engine.configs["a"] = model("X FP32 [2]", "Y FP32 [1]", name="a")
    await catalog.follow_models()
    assert catalog.oip_models.model("a").config.inputs[0].dims == (2,)


async def test_a_model_that_is_not_ready_keeps_its_configuration(tmp_path: Path) -> None:
    catalog = await catalog_of(tmp_path, "oip: {models: [c]}")
    engine = catalog.engine
    assert isinstance(engine, FakeEngine)
    engine.unready.add("c")
    await catalog.follow_models()
    engine.is_up = False
    await catalog.follow_models()
    assert catalog.oip_models.model("c").config.name == "c"


async def test_a_model_that_was_never_ready_is_not_ready(tmp_path: Path) -> None:
    catalog = await catalog_of(tmp_path, "oip: {models: [d]}")
    with pytest.raises(ModelNotReady):
        catalog.oip_models.model("d")


async def test_without_a_file_every_ready_model_is_exposed() -> None:
    engine = FakeEngine.of(*(model("X FP32 [1]", "Y FP32 [1]", name=name) for name in "ab"))
    engine.unready.add("b")
    catalog = Catalog(engine)
    catalog.load_file()
    await catalog.refresh()
    assert catalog.oip_models.names == ["a"]
