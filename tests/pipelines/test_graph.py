from dataclasses import replace
from pathlib import Path

import pytest

from app.core.model import ModelConfig
from app.pipelines.graph import MAX_STEPS, Edge, EdgeEnd, graph_of
from app.triton.repository import read_repository
from tests.toolkit.broken_repositories import Repository, sound


def named(end: EdgeEnd) -> str:
    return f"{end.step.name if end.step else '-'}.{end.tensor.name}"


def arrow(edge: Edge) -> str:
    tensor = edge.source.tensor
    return f"{named(edge.source)} > {named(edge.target)} {edge.name} {tensor.datatype}{list(tensor.dims)}"


@pytest.fixture
def models(tmp_path: Path) -> dict[str, ModelConfig]:
    repository = Repository(tmp_path)
    sound(repository)
    repository.ensemble("outer", "IN", "OUT", "sound X=IN > Y=a", "join A=a B=IN > Y=OUT")
    return {model.folder: model.config for model in read_repository(tmp_path)}


def test_a_plain_model_is_one_step(models: dict[str, ModelConfig]) -> None:
    graph = graph_of(models["ident"], models)
    assert [(step.name, step.ensemble) for step in graph.steps] == [("ident", "")]
    assert [arrow(edge) for edge in graph.edges] == ["-.X > ident.X X FP32[-1]", "ident.Y > -.Y Y FP32[-1]"]


def test_nested_ensembles_are_expanded_and_models_numbered(models: dict[str, ModelConfig]) -> None:
    graph = graph_of(models["outer"], models)
    assert [(step.name, step.ensemble) for step in graph.steps] == [
        ("ident", "sound"),
        ("ident#2", "sound"),
        ("join", "outer"),
    ]
    assert [arrow(edge) for edge in graph.edges] == [
        "-.IN > ident.X X FP32[-1]",
        "ident.Y > ident#2.X t FP32[-1]",
        "ident#2.Y > join.A a FP32[-1]",
        "-.IN > join.B IN FP32[-1]",
        "join.Y > -.OUT OUT FP32[-1]",
    ]


def test_steps_may_be_listed_in_any_order(models: dict[str, ModelConfig]) -> None:
    reordered = replace(models["outer"], steps=models["outer"].steps[::-1])
    assert set(map(arrow, graph_of(reordered, models).edges)) == set(
        map(arrow, graph_of(models["outer"], models).edges)
    )


def test_ensembles_are_listed_without_models(models: dict[str, ModelConfig]) -> None:
    below = {name: models[name] for name in ("outer", "sound", "ident", "join")}
    assert graph_of(models["outer"], below).ensembles == {"outer", "sound"}


def test_a_step_with_a_missing_model_is_omitted(models: dict[str, ModelConfig]) -> None:
    graph = graph_of(models["outer"], {"outer": models["outer"], "join": models["join"]})
    assert [step.name for step in graph.steps] == ["join"]


def test_an_input_of_a_model_in_several_steps_has_the_edges_that_may_be_at_fault(
    models: dict[str, ModelConfig],
) -> None:
    """The first `ident` reads a tensor of the request, which is checked before Triton gets it."""
    graph = graph_of(models["outer"], models)
    assert [arrow(edge) for edge in graph.into("ident", "X")] == ["ident.Y > ident#2.X t FP32[-1]"]
    assert [arrow(edge) for edge in graph.into("join", "A", "outer")] == ["ident#2.Y > join.A a FP32[-1]"]
    assert [arrow(edge) for edge in graph.into("join", "B")] == ["-.IN > join.B IN FP32[-1]"]


def test_ensembles_that_double_their_steps_are_cut(tmp_path: Path) -> None:
    """28 levels of two steps each are 268 million steps."""
    repository = Repository(tmp_path)
    sound(repository)
    repository.ensemble("e0", "IN", "OUT", "ident X=IN > Y=t", "ident X=t > Y=OUT")
    for level in range(1, 28):
        below = f"e{level - 1}"
        repository.ensemble(f"e{level}", "IN", "OUT", f"{below} IN=IN > OUT=t", f"{below} IN=t > OUT=OUT")
    models = {model.folder: model.config for model in read_repository(tmp_path)}
    assert 100 < len(graph_of(models["e27"], models).steps) < MAX_STEPS


def test_ensembles_that_are_nested_very_deep_are_cut(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    sound(repository)
    repository.ensemble("e0", "IN", "OUT", "ident X=IN > Y=OUT")
    for level in range(1, 600):
        repository.ensemble(f"e{level}", "IN", "OUT", f"e{level - 1} IN=IN > OUT=OUT")
    models = {model.folder: model.config for model in read_repository(tmp_path)}
    assert graph_of(models["e599"], models).steps == ()
