"""The errors and endings of models: early exits, which are ordinary empty results, and hints for the other errors.

Only the pipeline's rules decide whether a request ends early, and the first matching rule applies. An ``error`` rule
compares the code, if Triton sends one, and the *whole* message without Triton's prefixes. With a prefix or substring
match, text of a user that a model repeats could imitate an early exit.

A hint tells which step of an ensemble failed, which tensor is wrong, and what to do. A model may have written the
error's text, so callers see only names that the pipeline's graph has, and nothing else of the text.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import msgspec
import yaml
from msgspec import Struct

from app.codecs.kinds import shape_text
from app.core.errors import ContractViolation, Fault, FaultKind, GatewayError, UpstreamError
from app.core.inference import BYTES
from app.pipelines.models import Edge, Graph
from app.pipelines.spec import EarlyExitRule

EARLY_EXIT = re.compile(r"EARLY[ _-]?EXIT", re.IGNORECASE)
_SIGNED = re.compile(r"EARLY_EXIT/1 (?P<mac>[0-9a-f]{64}) (?P<claim>\{[^\x00-\x1f]{1,512}\})")


@dataclass(frozen=True, slots=True)
class EarlyExitRules:
    """``ensembles``: the names in Triton's prefixes of a message. ``key``: the key of signed markers."""

    rules: tuple[EarlyExitRule, ...]
    ensembles: frozenset[str]
    key: bytes | None = None

    def reason_of_error(self, error: UpstreamError, request_id: str) -> str | None:
        """Returns the reason of the first ``error`` rule that matches Triton's error."""
        message, code = self.bare(error.message, request_id), error.grpc_code
        for rule in self.rules:
            match = rule.error
            if match is None or match.code not in ("any", code if code or not match.signed else match.code):
                continue
            if match.signed:
                holds = self._is_signed(message, rule.reason, request_id)
            elif match.message is not None:
                holds = message == match.message
            else:
                holds = re.fullmatch(match.message_pattern or "", message) is not None
            if holds:
                return rule.reason
        return None

    def bare(self, message: str, request_id: str) -> str:
        """Removes Triton's prefixes that name an ensemble of this pipeline or this request from the message."""
        ensembles = "|".join(map(re.escape, self.ensembles)) or "(?!)"
        call = rf"{re.escape(request_id)}(?:\.[\w-]+\.[0-9]+)?"  # also of a step that the gateway runs
        return re.sub(rf"\A(?:in ensemble '(?:{ensembles})', |\[request id: {call}\] )*", "", message)

    def reason_of_outputs(self, written: Collection[str], empty: Collection[str]) -> str | None:
        """Returns the reason of the first ``missing`` or ``empty`` rule that matches, by tensor names.

        ``empty``: the written outputs that had no element in the whole answer.
        """
        for rule in self.rules:
            if rule.missing is not None and not any(name in written for name in rule.missing):
                return rule.reason
            if rule.empty is not None and all(name in empty for name in rule.empty):
                return rule.reason
        return None

    def _is_signed(self, message: str, reason: str, request_id: str) -> bool:
        found = _SIGNED.fullmatch(message)
        if found is None or self.key is None:
            return False
        expected = hmac.new(self.key, found["claim"].encode(), hashlib.sha256).hexdigest()
        if not hmac.compare_digest(expected, found["mac"]):
            return False
        try:
            said = json.loads(found["claim"])
        except ValueError:
            return False
        is_own = isinstance(said, dict) and f"{said.get('rid')}.".startswith(f"{request_id}.")
        return is_own and said.get("reason") == reason


_LONGEST_MESSAGE = 4096
_LONGEST_SHOWN = 320
_MANY_WRITERS = 4
_PATH = re.compile(r"(?<![\w/])/(?:[\w.+@-]+/)+[\w.+@-]*")


def explain(error: GatewayError, graph: Graph) -> None:
    """Sets the detail, hint and tensor of an error that has a fault, from the pipeline's graph."""
    if error.fault is None:
        return
    fault = replace(  # without the names that the graph does not have
        error.fault,
        ensemble=error.fault.ensemble if error.fault.ensemble in graph.ensembles else "",
        model=error.fault.model if error.fault.model in graph.models else "",
        tensor=error.fault.tensor if error.fault.tensor in graph.tensors else "",
    )
    error.failed_step = fault.model
    is_known = bool(fault.model and (fault.tensor or fault.kind is FaultKind.MANY_ROWS))
    edges = graph.into(fault.model, fault.tensor, fault.ensemble) if is_known else []
    if len({edge.target.tensor.name for edge in edges}) == 1:
        fault = replace(fault, tensor=edges[0].target.tensor.name)
    texts = _TEXTS[fault.kind]
    if texts.detail and is_known:
        steps = {edge.target.step.name for edge in edges if edge.target.step is not None}
        of_tensor = f"Input '{fault.tensor}' of step" if fault.tensor else "Step"
        step = f"{of_tensor} '{steps.pop() if len(steps) == 1 else fault.model}'"
        error.detail = texts.detail.format(step=step, fault=fault)
    elif fault.kind is FaultKind.RAISED and fault.model:
        error.detail = f"{named_model(fault.model, graph)} raised an exception."
    case, sizes = "step" if edges else "unknown", _sizes(fault.seen)
    if "any" in texts.hints:
        case = "any"
    elif fault.kind is FaultKind.NOT_GIVEN and edges and all(edge.source.step is None for edge in edges):
        case = "request"
    elif fault.kind is FaultKind.SHAPE and edges and 0 in sizes and len(sizes) != len(_sizes(fault.expected)):
        case = "empty"
    hint = texts.hints[case].format(fault=fault, **_words(fault, edges, graph))
    error.hint = hint[0].upper() + hint[1:]
    if isinstance(error, ContractViolation) and fault.tensor:
        error.tensor = fault.tensor


def _words(fault: Fault, edges: Sequence[Edge], graph: Graph) -> dict[str, str]:
    """The words in hints that depend on the fault."""
    words = {
        "model": f"'{fault.model}'" if fault.model else "the model",
        "ensemble": f"ensemble '{fault.ensemble}'" if fault.ensemble else "an ensemble",
        "written": ", ".join(f"'{edge.name}' by {_writer(edge)}" for edge in graph.into_response()),
        "step": f"The error concerns an input of '{fault.model}', which a BLS script calls."
        if fault.model
        else "A model that a BLS script calls failed; declare `bls_calls` in the script's config.pbtxt to see "
        "its name.",
    }
    out_of = graph.out_of(fault.tensor, fault.ensemble) if fault.tensor else None
    words["splitting"] = _writer(out_of) if out_of is not None else "A step with dynamic batching"
    if edges:
        source, target, expected = edges[0].source.tensor, edges[0].target, _sizes(fault.expected)
        batch = (1,) * (len(expected) - len(target.tensor.dims))
        no_rows = _NO_ROWS_OF_TEXTS if target.tensor.datatype == BYTES else _NO_ROWS
        words |= {
            "writer": _writer(*edges),
            "source": source.name,
            "reader": "the response" if target.step is None else f"step '{target.step.name}'",
            # The shape of an empty tensor: a batch dimension of 1, if there is one, and 0 for every free dimension.
            "empty": shape_text(batch + tuple(max(dim, 0) for dim in target.tensor.dims)),
            "no_rows": no_rows.format(tensor=target.tensor.name, model=fault.model),
        }
    return words


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
    """A step is a model below the pipeline's own model. The steps of a pipeline have names of their own."""
    is_whole = any(step.part_of or (step.model == model and not step.ensemble) for step in graph.steps)
    return f"{'Model' if is_whole else 'Step'} '{model}'"


def public_text(message: str) -> str:
    """A model's message on one line, bounded, without traceback and without absolute paths."""
    text = _PATH.sub("...", message.partition("\n\nAt:")[0][:_LONGEST_MESSAGE])
    return " ".join(text.split())[:_LONGEST_SHOWN]


class _FaultTexts(Struct, frozen=True, forbid_unknown_fields=True):
    """``detail``: empty if that of the error is kept. ``hints``: by what is known of the tensor."""

    hints: Mapping[str, str]
    detail: str = ""


_TEXTS = msgspec.convert(
    yaml.safe_load(files("app.pipelines").joinpath("faults.yaml").read_text("utf-8")), dict[FaultKind, _FaultTexts]
)

_NO_ROWS = "input byte size mismatch for input '{tensor}' for model '{model}'. Expected [0-9]+, got 0"
_NO_ROWS_OF_TEXTS = "expected [0-9]+ string elements for inference input '{tensor}' for model '{model}', got 0"
"""Regular expressions for the messages of Triton 2.51."""


def _writer(*edges: Edge) -> str:
    """Names every step that may have written the tensor."""
    sources = dict.fromkeys(edge.source for edge in edges)
    names = [
        f"step '{each.step.name}' (its output '{each.tensor.name}')" if each.step is not None else "the request"
        for each in sources
    ]
    return " or ".join(names if len(names) <= _MANY_WRITERS else [*names[:_MANY_WRITERS], "another step"])


def _sizes(shape: str) -> list[int]:
    """The sizes in a shape as Triton writes it."""
    return [int(size) for size in shape.strip("[]").split(",") if size.strip(" -").isdecimal()]
