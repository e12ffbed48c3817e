"""Whether the requests of a pipeline may share calls, as far as its declaration and its models tell."""

from collections.abc import Iterator, Mapping, Sequence

from app.core.coalescing import Coalescing
from app.core.model import ModelConfig, reached
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.spec import PipelineSpec


def coalescing_of(spec: PipelineSpec, config: ModelConfig, models: Mapping[str, ModelConfig]) -> Coalescing | None:
    """``models``: those that a request runs through, as far as they are known. None without ``coalesce``.

    Raises PipelineMismatch with the reason if requests must not share calls.
    """
    if spec.coalesce is None:
        return None
    steps = reached(config, models, by_steps=True)
    refusal = next(_refusals(spec, config, steps), None)
    if refusal is not None:
        raise PipelineMismatch(("coalesce",), f"is on, but {refusal}")
    smallest = min(each.max_batch_size for each in steps)
    return Coalescing(
        max_items=min(smallest, spec.coalesce.max_items or smallest),
        max_bytes=spec.coalesce.max_bytes,
        outputs={each.name: each.dims for each in config.outputs},
        steps=sum(not each.is_ensemble for each in steps) or 1,
        tolerance=spec.coalesce.tolerance,
    )


def _refusals(spec: PipelineSpec, config: ModelConfig, steps: Sequence[ModelConfig]) -> Iterator[str]:
    if not spec.idempotent:
        yield "the pipeline is not `idempotent: true`: a request of a call that failed is sent again"
    if not spec.runs_sample:
        yield "the pipeline has no `sample` that runs at start, with which the gateway tries the model"
    if spec.early_exit:
        yield "the pipeline has `early_exit` rules: they are for one request, and would end all requests of a call"
    if spec.cancel is not None:
        yield "the pipeline has `cancel`, which would stop the other requests of a call"
    if spec.deadline_parameter is not None:
        yield "the pipeline has `deadline_parameter`, and the requests of a call have different deadlines"
    for tensor, contract in spec.contract.items():
        if contract.max_items is not None:
            yield f"the contract of '{tensor}' counts items, which a model would count over all requests of a call"
    for model in steps:
        yield from (f"model '{model.name}' {refusal}" for refusal in _refusals_of(model))


def _refusals_of(model: ModelConfig) -> Iterator[str]:
    if model.decoupled:
        yield "is decoupled"
    if model.sequence is not None:
        yield "has sequence batching"
    if model.max_batch_size < 2:
        yield f"does not batch (max_batch_size is {model.max_batch_size})"
    for name in model.unjoinable_inputs:
        yield f"has the input '{name}', which is ragged or a shape tensor"
    if model.caches_responses:
        yield "has a response_cache, which joined requests never hit"
    for name in model.may_omit:
        yield f"may omit the output '{name}', and would omit it for every request of a call"
