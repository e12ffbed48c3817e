"""Errors of models: known messages, the step that failed, and hints from the graph of the pipeline."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest

from app.config.mismatch import PipelineMismatch
from app.core.errors import (
    ContractViolation,
    Fault,
    FaultKind,
    GatewayError,
    InvalidInput,
    ModelError,
)
from app.core.model import ModelConfig
from app.pipelines.model_errors import explain
from app.pipelines.models import MAX_STEPS, Edge, EdgeEnd, Graph, graph_of
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import LONGEST_MESSAGE, early_exit_of
from app.triton.repository import read_repository
from tests.toolkit.broken_repositories import Repository, sound
from tests.toolkit.models import ensemble, model, pipeline, refusal

CONFIG = model("text_input BYTES [1]", "text_output BYTES [1]", name="llama", decoupled=True)
RULES = [
    {"message_pattern": "^(Error generating stream: )?Grammar error: ", "code": "invalid_input", "field": "schema"},
    {
        "message_pattern": r"LoRA feature is not enabled\.",
        "code": "invalid_input",
        "detail": "There is no such adapter.",
    },
]
PARAMETERS = {"schema": {"type": "string", "optional": True}}

REFUSED = [
    ("Grammar error: Invalid type: nonsense", ["schema"], "The model refused the input."),
    ("LoRA feature is not enabled.", [], "There is no such adapter."),
]
"""Messages of vLLM, in vLLM's words."""


def error_of(message: str, grpc_code: str | None = None) -> GatewayError:
    """The error that a caller gets if the model fails with this message."""
    p = pipeline(CONFIG, refusals=RULES, parameters=PARAMETERS, stream=True)
    with pytest.raises(GatewayError) as raised:
        early_exit_of(p, refusal(message, grpc_code), "rid")
    return raised.value


@pytest.mark.parametrize(
    ("grpc_code", "prefix"),
    [(None, ""), (None, "Error generating stream: "), ("INTERNAL", ""), ("INVALID_ARGUMENT", "")],
)
@pytest.mark.parametrize(("message", "fields", "detail"), REFUSED)
def test_a_known_message_is_an_error_of_the_caller(
    message: str, fields: list[str], detail: str, *, grpc_code: str | None, prefix: str
) -> None:
    error = error_of(prefix + message, grpc_code)
    assert (type(error), [each.field for each in error.errors], error.detail) == (InvalidInput, fields, detail)
    assert error.upstream is not None
    assert message not in f"{error.detail}{error.hint}{error.errors}"


@pytest.mark.parametrize(
    "message",
    ["'NoneType' object has no attribute 'lora_name'", "out of memory", "x" * LONGEST_MESSAGE + REFUSED[1][0]],
)
def test_another_message_stays_an_error_of_the_model(message: str) -> None:
    assert type(error_of(message)) is ModelError


def test_an_early_exit_comes_first() -> None:
    exits = [{"reason": "empty", "error": {"code": "any", "message": REFUSED[1][0]}}]
    p = pipeline(CONFIG, refusals=RULES, parameters=PARAMETERS, early_exit=exits)
    assert early_exit_of(p, refusal(REFUSED[1][0], None), "rid") == "empty"


def test_a_rule_names_a_field_of_the_pipeline() -> None:
    with pytest.raises(PipelineMismatch, match="did you mean 'text_input'"):
        pipeline(CONFIG, refusals=[{"message_pattern": "x", "code": "invalid_input", "field": "text_inputs"}])


@pytest.mark.parametrize(("message", "has_hint"), [("EXIT", True), ("[request id: rid] EXIT", True), ("xEXIT", False)])
def test_the_message_of_an_early_exit_with_another_code_gets_a_hint(message: str, *, has_hint: bool) -> None:
    rules = [{"reason": "no", "error": {"code": "ALREADY_EXISTS", "message": "EXIT"}}]
    with pytest.raises(ModelError) as caught:
        early_exit_of(pipeline(CONFIG, early_exit=rules), refusal(message, "INTERNAL"), "rid")
    assert ("'no'" in (caught.value.hint or "")) is has_hint


class TestNameOfTheFailedStep:
    STEP = model("X FP32 [1]", "Z FP32 [1]", name="preprocess")
    P = pipeline(ensemble("whole", STEP), STEP)

    def failed(self, message: str, p: Pipeline | None = None) -> GatewayError:
        with pytest.raises(GatewayError) as caught:
            early_exit_of(p or self.P, refusal(message, "INTERNAL"), "rid")
        return caught.value

    def test_the_error_names_a_step_that_names_itself(self) -> None:
        error = self.failed("in ensemble 'whole', preprocess: a user's secret")
        assert error.detail == "Step 'preprocess' failed."
        assert "list 'preprocess' under `rejects_input`" in (error.hint or "")
        assert "log has the model's message in the line with this request id" in (error.hint or "")
        assert "secret" not in f"{error.detail}{error.hint}"

    @pytest.mark.parametrize(
        "message", ["secret: no", "preprocess", "'preprocess': no", "in ensemble 'x', preprocess: no"]
    )
    def test_other_names_are_not_shown(self, message: str) -> None:
        error = self.failed(message)
        assert error.detail == "Model 'model' failed."
        assert "begins its message with its own name" in (error.hint or "")
        assert "secret" not in (error.hint or "")

    def test_a_plain_model_is_no_step_of_its_own_pipeline(self) -> None:
        plain = pipeline(model("X FP32 [1]", "Y FP32 [1]"))
        for message in ("broken", "model: broken"):
            assert self.failed(message, plain).detail == "Model 'model' failed."

    def test_the_message_is_shown_if_the_setting_allows_it(self) -> None:
        exposing = copy.copy(self.P)
        exposing.exposes_errors = True
        message = (
            "in ensemble 'whole', preprocess: no file\n/srv/models/x/1/model.py" + "\n\nAt:\n  /a/b.py(2): execute"
        )
        assert self.failed(message, exposing).detail == (
            "Step 'preprocess' failed. The model's message: preprocess: no file ..."
        )
        assert len(self.failed("x" * 9000, exposing).detail) < 400


def named(end: EdgeEnd) -> str:
    return f"{end.step.name if end.step else '-'}.{end.tensor.name}"


def arrow(edge: Edge) -> str:
    tensor = edge.source.tensor
    return f"{named(edge.source)} > {named(edge.target)} {edge.name} {tensor.datatype}{list(tensor.dims)}"


@pytest.fixture
def models(tmp_path: Path) -> dict[str, ModelConfig]:
    repository = Repository(tmp_path)
    sound(repository)
    repository.model("boxed", "X:FP32:3,4", "Y")
    repository.ensemble("outer", "IN", "OUT", "sound X=IN > Y=a", "join A=a B=IN > Y=OUT")
    repository.ensemble("chain", "X", "Y", "fork X=X > P=p Q=q", "join A=p B=q > Y=Y")
    repository.ensemble(
        "same", "X", "Y Z", "fork X=X > P=p Q=q", "ident X=p > Y=r", "ident X=r > Y=Y", "ident X=q > Y=Z"
    )
    return {model.folder: model.config for model in read_repository(tmp_path)}


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
    reordered = replace(models["outer"], steps=models["outer"].steps[::-1])
    assert set(map(arrow, graph_of(reordered, models).edges)) == set(map(arrow, graph.edges))
    below = {name: models[name] for name in ("outer", "sound", "ident", "join")}
    assert graph_of(models["outer"], below).ensembles == {"outer", "sound"}
    without = graph_of(models["outer"], {"outer": models["outer"], "join": models["join"]})
    assert [step.name for step in without.steps] == ["join"]
    plain = graph_of(models["ident"], models)
    assert [(step.name, step.ensemble) for step in plain.steps] == [("ident", "")]
    assert [arrow(edge) for edge in plain.edges] == ["-.X > ident.X X FP32[-1]", "ident.Y > -.Y Y FP32[-1]"]


def test_an_input_of_a_model_in_several_steps_has_the_edges_that_may_be_at_fault(
    models: dict[str, ModelConfig],
) -> None:
    """The first `ident` reads a tensor of the request, which is checked before Triton gets it."""
    graph = graph_of(models["outer"], models)
    assert [arrow(edge) for edge in graph.into("ident", "X")] == ["ident.Y > ident#2.X t FP32[-1]"]
    assert [arrow(edge) for edge in graph.into("join", "A", "outer")] == ["ident#2.Y > join.A a FP32[-1]"]
    assert [arrow(edge) for edge in graph.into("join", "B")] == ["-.IN > join.B IN FP32[-1]"]


@pytest.mark.parametrize(
    ("levels", "doubles", "steps"),
    [(28, True, range(101, MAX_STEPS)), (600, False, range(1))],
    ids=["28 levels of two steps each are 268 million steps", "600 levels"],
)
def test_ensembles_with_too_many_steps_or_levels_are_cut(
    tmp_path: Path, levels: int, *, doubles: bool, steps: range
) -> None:
    repository = Repository(tmp_path)
    sound(repository)
    for level in range(levels):
        below, given, written = (f"e{level - 1}", "IN", "OUT") if level else ("ident", "X", "Y")
        ends = [("IN", "t"), ("t", "OUT")] if doubles else [("IN", "OUT")]
        wires = [f"{below} {given}={source} > {written}={target}" for source, target in ends]
        repository.ensemble(f"e{level}", "IN", "OUT", *wires)
    models = {model.folder: model.config for model in read_repository(tmp_path)}
    assert len(graph_of(models[f"e{levels - 1}"], models).steps) in steps


@pytest.fixture
def graph(models: dict[str, ModelConfig]) -> Graph:
    return graph_of(models["chain"], models)


def explained(graph: Graph, fault: Fault, error: GatewayError | None = None) -> GatewayError:
    error = error or ContractViolation("plain", tensor="-")
    error.fault = fault
    explain(error, graph)
    return error


def test_the_hint_names_every_step_that_may_have_written_the_tensor(
    graph: Graph, models: dict[str, ModelConfig]
) -> None:
    error = explained(graph, Fault(FaultKind.NOT_GIVEN, "chain", "join", "B"))
    assert error.hint.startswith("Step 'fork' (its output 'Q') did not write it")
    assert error.tensor == "B"
    error = explained(graph, Fault(FaultKind.NOT_GIVEN, "chain", "fork", "X"))
    assert error.hint == "The request does not have 'X', which step 'fork' requires."
    error = explained(graph_of(models["same"], models), Fault(FaultKind.NOT_GIVEN, "same", "ident", "X"))
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
