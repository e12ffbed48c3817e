"""Explains faults with the pipeline's graph. tests/live/test_explained_errors.py uses messages of the real Triton."""

from pathlib import Path

import pytest

from app.core.errors import ContractViolation, Fault, FaultKind, GatewayError, ModelError
from app.pipelines.error_hints import explain
from app.pipelines.graph import Graph, graph_of
from app.triton.repository import read_repository
from tests.toolkit.broken_repositories import Repository, sound


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    repository = Repository(tmp_path)
    sound(repository)
    repository.model("boxed", "X:FP32:3,4", "Y")
    repository.ensemble("chain", "X", "Y", "fork X=X > P=p Q=q", "join A=p B=q > Y=Y")
    repository.ensemble(
        "same", "X", "Y Z", "fork X=X > P=p Q=q", "ident X=p > Y=r", "ident X=r > Y=Y", "ident X=q > Y=Z"
    )
    models = {model.folder: model.config for model in read_repository(tmp_path)}
    return graph_of(models["chain"], models)


@pytest.fixture
def same(tmp_path: Path, graph: Graph) -> Graph:
    models = {model.folder: model.config for model in read_repository(tmp_path)}
    return graph_of(models["same"], models)


def explained(graph: Graph, fault: Fault, error: GatewayError | None = None) -> GatewayError:
    error = error or ContractViolation("plain", tensor="-")
    error.fault = fault
    explain(error, graph)
    return error


def test_an_error_without_a_fault_is_unchanged(graph: Graph) -> None:
    error = ModelError("plain", hint="the hint")
    explain(error, graph)
    assert (error.detail, error.hint) == ("plain", "the hint")


def test_the_hint_names_the_step_that_writes_the_tensor(graph: Graph) -> None:
    error = explained(graph, Fault(FaultKind.NOT_GIVEN, "chain", "join", "B"))
    assert error.hint.startswith("Step 'fork' (its output 'Q') did not write it")
    assert error.tensor == "B"


def test_the_hint_names_a_missing_input_of_the_request(graph: Graph) -> None:
    error = explained(graph, Fault(FaultKind.NOT_GIVEN, "chain", "fork", "X"))
    assert error.hint == "The request does not have 'X', which step 'fork' requires."


def test_the_hint_names_every_step_that_may_have_written_the_tensor(same: Graph) -> None:
    error = explained(same, Fault(FaultKind.NOT_GIVEN, "same", "ident", "X"))
    assert error.detail == "Step 'ident' did not receive its input 'X'."
    assert error.hint.startswith(
        "Step 'fork' (its output 'P') or step 'fork' (its output 'Q') or step 'ident' (its output 'Y') did not write "
    )


@pytest.mark.parametrize("kind", FaultKind)
@pytest.mark.parametrize("word", ["a secret", "<script>", "x" * 5000])
def test_unknown_names_are_never_shown(graph: Graph, kind: FaultKind, word: str) -> None:
    error = explained(graph, Fault(kind, word, word, word))
    assert word not in f"{error.detail}{error.hint}"
    assert error.tensor == "-"


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_has_a_hint_of_limited_length(graph: Graph, kind: FaultKind) -> None:
    error = explained(graph, Fault(kind, "chain", "join", "A", "[-1,3,320,320]", "[0]"))
    assert 20 < len(error.hint) <= 512
    assert error.hint[0].isupper() or error.hint[0] == "`"


def test_a_model_outside_the_graph_gets_a_hint_about_bls(graph: Graph) -> None:
    error = explained(graph, Fault(FaultKind.SHAPE, "chain", "boxed", "X", "[3,4]", "[0]"))
    assert error.detail == "Input 'X' of step 'boxed' expects shape [3,4] but received [0]."
    assert "which a BLS script calls" in error.hint
