"""Explains Triton's errors about ensembles: which step failed, which tensor is wrong, what to do.

A model may have written the error's text, so the names in it cannot be trusted. Callers see only names that the
pipeline's graph has, and nothing else of the text.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from app.codecs.kinds import shape_text
from app.core.errors import ContractViolation, Fault, FaultKind, GatewayError
from app.core.inference import BYTES
from app.core.model import TensorSpec
from app.pipelines.graph import Edge, Graph

_LONGEST_MESSAGE = 4096
_LONGEST_SHOWN = 320
_MANY_WRITERS = 4
_PATH = re.compile(r"(?<![\w/])/(?:[\w.+@-]+/)+[\w.+@-]*")


def explain(error: GatewayError, graph: Graph) -> None:
    """Sets the detail, hint and tensor of an error that has a fault, from the pipeline's graph."""
    if error.fault is None:
        return
    fault = _known(error.fault, graph)
    error.failed_step = fault.model
    is_known = bool(fault.model and (fault.tensor or fault.kind is FaultKind.MANY_ROWS))
    edges = graph.into(fault.model, fault.tensor, fault.ensemble) if is_known else []
    if len({edge.target.tensor.name for edge in edges}) == 1:
        fault = replace(fault, tensor=edges[0].target.tensor.name)
    detail = _DETAIL.get(fault.kind)
    if detail is not None and is_known:
        steps = {edge.target.step.name for edge in edges if edge.target.step is not None}
        error.detail = detail(replace(fault, model=steps.pop()) if len(steps) == 1 else fault)
    elif fault.kind is FaultKind.RAISED and fault.model:
        error.detail = f"{named_model(fault.model, graph)} raised an exception."
    hint = _hint(fault, edges, graph)
    error.hint = hint[0].upper() + hint[1:]
    if isinstance(error, ContractViolation) and fault.tensor:
        error.tensor = fault.tensor


def name_failed_step(error: GatewayError, message: str, graph: Graph) -> None:
    """Completes an error that a model sent itself. ``message``: the model's, without what Triton puts in front.

    A step names itself at the start of its message: ``<model>: <text>``. Only the name is shown, and only if the graph
    knows it.
    """
    step, separator, _ = message.partition(": ")
    if separator and step in graph.models:
        error.detail = f"{named_model(step, graph)} failed."
        error.failed_step = step
        blame = f"If the input is at fault, let it answer with INVALID_ARG and list '{step}' under `rejects_input`."
    elif graph.ensembles:
        blame = "A step that begins its message with its own name (`<model>: <text>`) is named here."
    else:
        blame = "If the input is at fault, let the model answer with INVALID_ARG and list it under `rejects_input`."
    error.hint = f"{blame} The gateway's log has the model's message in the line with this request id."


def named_model(model: str, graph: Graph) -> str:
    """A step is a model below the pipeline's own model."""
    is_whole = any(step.model == model and not step.ensemble for step in graph.steps)
    return f"{'Model' if is_whole else 'Step'} '{model}'"


def public_text(message: str) -> str:
    """A model's message on one line, bounded, without traceback and without absolute paths."""
    text = _PATH.sub("...", message.partition("\n\nAt:")[0][:_LONGEST_MESSAGE])
    return " ".join(text.split())[:_LONGEST_SHOWN]


def _known(fault: Fault, graph: Graph) -> Fault:
    """Removes the names that the graph does not have from the fault."""
    return replace(
        fault,
        ensemble=fault.ensemble if fault.ensemble in graph.ensembles else "",
        model=fault.model if fault.model in graph.models else "",
        tensor=fault.tensor if fault.tensor in graph.tensors else "",
    )


def _not_given(fault: Fault, edges: Sequence[Edge], _graph: Graph) -> str:
    if not edges:
        return f"{_some_step(fault)} Always write that tensor in the step before it, or declare the input optional."
    if all(edge.source.step is None for edge in edges):
        return f"The request does not have '{edges[0].source.tensor.name}', which {_reader(edges[0])} requires."
    return (
        f"{_writer(*edges)} did not write it: always write the output, end the request with an early-exit error, "
        f"or declare '{fault.tensor}' optional in the configuration of '{fault.model}'."
    )


def _other_shape(fault: Fault, edges: Sequence[Edge], _graph: Graph) -> str:
    if not edges:
        return f"{_some_step(fault)} A step wrote shape {fault.seen} where {fault.expected} is declared."
    seen, expected = _sizes(fault.seen), _sizes(fault.expected)
    if 0 in seen and len(seen) != len(expected):
        return (
            f"{_writer(*edges)} wrote an empty tensor of shape {fault.seen}: keep the rank in empty tensors "
            f"(such as {_empty(expected, edges[0].target.tensor)}), or end the request with an early-exit error."
        )
    return (
        f"{_writer(*edges)} wrote {fault.seen}: write {fault.expected}, or correct `dims` of '{fault.tensor}' in "
        f"the configuration of '{fault.model}'. If the tensor grows with each response, send only the new items."
    )


def _not_split(fault: Fault, _edges: Sequence[Edge], graph: Graph) -> str:
    edge = graph.out_of(fault.tensor, fault.ensemble) if fault.tensor else None
    step = _writer(edge) if edge else "A step with dynamic batching"
    return (
        f"{step} wrote an output whose first dimension differs from the batch size: export the network with a dynamic "
        "batch axis in every output, or set max_batch_size: 0 for the model."
    )


def _deadlock(fault: Fault, _edges: Sequence[Edge], graph: Graph) -> str:
    written = ", ".join(f"'{edge.name}' by {_writer(edge)}" for edge in graph.into_response())
    return (
        f"A step of {_ensemble(fault)} did not write a tensor that an output depends on. The outputs are written: "
        f"{written}. Each step must write every mapped output, and every tensor of the ensemble needs a unique name."
    )


_DETAIL: dict[FaultKind, Callable[[Fault], str]] = {
    FaultKind.NOT_GIVEN: lambda fault: f"Step '{fault.model}' did not receive its input '{fault.tensor}'.",
    FaultKind.SHAPE: lambda fault: _expects("shape", fault),
    FaultKind.DATATYPE: lambda fault: _expects("datatype", fault),
    FaultKind.ITEMS: lambda fault: _expects("a number of items of at most", fault),
    FaultKind.NO_ROWS: lambda fault: f"Input '{fault.tensor}' of step '{fault.model}' received no rows.",
    FaultKind.MANY_ROWS: lambda fault: (
        (f"Input '{fault.tensor}' of step" if fault.tensor else "Step")
        + f" '{fault.model}' received more than {fault.expected} rows, its `max_batch_size`."
    ),
}

_HINT: dict[FaultKind, Callable[[Fault, Sequence[Edge], Graph], str]] = {
    FaultKind.NOT_GIVEN: _not_given,
    FaultKind.SHAPE: _other_shape,
    FaultKind.SPLIT: _not_split,
    FaultKind.DEADLOCK: _deadlock,
}

_HINT_OF_EDGE: dict[FaultKind, tuple[str, str]] = {
    FaultKind.DATATYPE: (
        "{some_step} A step wrote {seen} where {expected} is declared.",
        "{writer} wrote {seen}: convert the tensor to {expected} in that step.",
    ),
    FaultKind.ITEMS: (
        "{some_step} A step wrote {seen} items; the limit is {expected}.",
        "{writer} wrote {seen}: send only items that are new since the last response.",
    ),
    FaultKind.NO_ROWS: (
        "{some_step} Triton runs no model without rows: do not call it.",
        "{writer} wrote no rows, and Triton runs no step without rows. For an early exit instead of this error, add to "
        "`early_exit` in gateway.yaml: {{reason: no_rows, error: {{code: INVALID_ARGUMENT, "
        'message_pattern: "{no_rows}"}}}}',
    ),
    FaultKind.MANY_ROWS: (
        "{some_step} Send it at most {expected} rows at a time.",
        "{writer} wrote more than {expected} rows: write fewer, or raise `max_batch_size` of '{model}'.",
    ),
}
"""For a tensor whose edges are unknown, and for one whose edges are known."""

_HINT_OF_MODEL: dict[FaultKind, str] = {
    FaultKind.RESPONSE_COUNT: "`execute` of {} must return one InferenceResponse for each request, in the same order. "
    "A script with a response sender needs model_transaction_policy {{ decoupled: true }} and returns None.",
    FaultKind.RETURNED_DECOUPLED: "`execute` of {} must send every response with the request's response sender and "
    "return None, or remove model_transaction_policy {{ decoupled: true }} from its configuration.",
    FaultKind.CHILD_DECOUPLED: "Call {} with exec(decoupled=True) and read all its responses.",
    FaultKind.CHILD_NOT_READY: "Load {} in Triton, or correct the name that the script calls.",
    FaultKind.RAISED: "When `execute` of {} raises, Triton fails every request of the batch. Catch exceptions for each "
    "request and return InferenceResponse(error=TritonError(...)). Triton's log has the traceback.",
}


def _hint(fault: Fault, edges: Sequence[Edge], graph: Graph) -> str:
    if fault.kind in _HINT_OF_MODEL:
        return _HINT_OF_MODEL[fault.kind].format(_model(fault))
    if fault.kind not in _HINT_OF_EDGE:
        return _HINT[fault.kind](fault, edges, graph)
    without_edge, with_edge = _HINT_OF_EDGE[fault.kind]
    if not edges:
        return without_edge.format(some_step=_some_step(fault), seen=fault.seen, expected=fault.expected)
    target = edges[0].target.tensor
    no_rows = _NO_ROWS_OF_TEXTS if target.datatype == BYTES else _NO_ROWS
    return with_edge.format(
        writer=_writer(*edges),
        seen=fault.seen,
        expected=fault.expected,
        model=fault.model,
        no_rows=no_rows.format(tensor=target.name, model=fault.model),
    )


_NO_ROWS = "input byte size mismatch for input '{tensor}' for model '{model}'. Expected [0-9]+, got 0"
_NO_ROWS_OF_TEXTS = "expected [0-9]+ string elements for inference input '{tensor}' for model '{model}', got 0"
"""Regular expressions for the messages of Triton 2.51."""


def _expects(what: str, fault: Fault) -> str:
    return f"Input '{fault.tensor}' of step '{fault.model}' expects {what} {fault.expected} but received {fault.seen}."


def _writer(*edges: Edge) -> str:
    """Names every step that may have written the tensor."""
    sources = dict.fromkeys(edge.source for edge in edges)
    names = [
        f"step '{each.step.name}' (its output '{each.tensor.name}')" if each.step is not None else "the request"
        for each in sources
    ]
    return " or ".join(names if len(names) <= _MANY_WRITERS else [*names[:_MANY_WRITERS], "another step"])


def _reader(edge: Edge) -> str:
    return "the response" if edge.target.step is None else f"step '{edge.target.step.name}'"


def _model(fault: Fault) -> str:
    return f"'{fault.model}'" if fault.model else "the model"


def _ensemble(fault: Fault) -> str:
    return f"ensemble '{fault.ensemble}'" if fault.ensemble else "an ensemble"


def _some_step(fault: Fault) -> str:
    """For a fault in a model that a BLS script calls; the graph has such a call only if it is declared."""
    if fault.model:
        return f"The error concerns an input of '{fault.model}', which a BLS script calls."
    return "A model that a BLS script calls failed; declare `bls_calls` in the script's config.pbtxt to see its name."


def _sizes(shape: str) -> list[int]:
    return [int(size) for size in shape.strip("[]").split(",") if size]


def _empty(expected: list[int], spec: TensorSpec) -> str:
    """The shape of an empty tensor: a batch dimension of 1, if there is one, and 0 for every free dimension."""
    batch = (1,) * (len(expected) - len(spec.dims))
    return shape_text(batch + tuple(max(dim, 0) for dim in spec.dims))
