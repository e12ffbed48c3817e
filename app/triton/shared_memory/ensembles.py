"""Decides whether Triton no longer uses the tensors of a call after the call has ended.

This is true for a model that is not an ensemble. An ensemble ends as soon as one step fails, while parallel steps
continue. So each step that reads an input or writes an output of the call must not run in parallel with another step.
"""

from collections.abc import Callable, Iterable, Mapping

from app.domain.model import ModelConfig, Step

ModelKey = tuple[str, str]
"""Name and version; an empty version means the newest."""


def ends_with_call(model: ModelKey, tensors: frozenset[str], configs: Mapping[ModelKey, ModelConfig]) -> bool:
    """Returns False for a model that is not in ``configs``. ``tensors``: inputs and outputs of the model."""
    config = configs.get(model)
    if config is None or not config.is_ensemble:
        return config is not None
    return not config.decoupled and all(
        _runs_alone(config.steps, i) and ends_with_call((step.model, step.version), touched, configs)
        for i, step in enumerate(config.steps)
        if (touched := _touched(step, tensors))
    )


def _touched(step: Step, tensors: frozenset[str]) -> frozenset[str]:
    """Returns the tensors of the step's model that are mapped to ``tensors`` of the ensemble."""
    return frozenset(name for name, tensor in (*step.input_map, *step.output_map) if tensor in tensors)


def _runs_alone(steps: tuple[Step, ...], step: int) -> bool:
    """Whether no other step can run at the same time as this step."""
    indexes = range(len(steps))
    before = _reached(step, lambda i: [j for j in indexes if _feeds(steps[j], steps[i])])
    after = _reached(step, lambda i: [j for j in indexes if _feeds(steps[i], steps[j])])
    return len(before | after) == len(steps)


def _reached(start: int, next_of: Callable[[int], Iterable[int]]) -> set[int]:
    reached, waiting = {start}, [start]
    while waiting:
        new = set(next_of(waiting.pop())) - reached
        reached |= new
        waiting += new
    return reached


def _feeds(first: Step, second: Step) -> bool:
    """Whether the second step reads a tensor that the first step writes."""
    written = {tensor for _, tensor in first.output_map}
    return any(tensor in written for _, tensor in second.input_map)
