"""One version of a pipeline until it can be served: finds its model, compiles it, and runs its sample."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from app.core.aio import Backoff
from app.core.errors import GatewayError
from app.core.model import ModelConfig
from app.pipelines.compile import CompileContext, compile_pipeline
from app.pipelines.file import GatewayFile
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.models import Lookup, Missing
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import PipelineSpec

_LONGEST_TEXT = 2000
_EXPECTED = (GatewayError, OSError, TypeError, ValueError)
"""The exceptions of a sample that cannot be read, sent or answered."""

_log = logging.getLogger(__name__)


class VersionState(StrEnum):
    READY = "ready"
    WARMING = "warming"
    MODEL_NOT_READY = "model_not_ready"
    MISCONFIGURED = "misconfigured"

    @property
    def words(self) -> str:
        return self.value.replace("_", " ")


@dataclass(slots=True, eq=False)
class PipelineVersion:
    """``detail`` is the reason why it is not ready for callers, ``problem`` the reason for the log.

    ``file`` is None if the pipeline is derived from a model. ``pipeline`` is None until it is compiled.
    """

    name: str
    spec: PipelineSpec
    file: GatewayFile | None = None
    replaces: bool = False
    """Whether an older version of the pipeline stays active until this version can be served."""
    state: VersionState = VersionState.MODEL_NOT_READY
    detail: str = "Its model has not been seen yet."
    problem: str = ""
    pipeline: Pipeline | None = None
    warming: "asyncio.Task[None] | None" = None
    """The task that runs the sample; its exception is the sample's failure."""
    _models: Mapping[str, ModelConfig] = field(default_factory=dict)
    _backoff: Backoff = field(default_factory=Backoff)
    _logged: str = ""
    """The last problem in the log, without the model's own message."""

    def follow(self, lookup: Lookup, context: CompileContext) -> None:
        """Compiles the version when its models are first available, and again when a model changes."""
        found = lookup.models_of(self.spec.model, self.spec.version)
        if isinstance(found, Missing):
            self.stop()
            self.state, self.detail = VersionState.MODEL_NOT_READY, found.detail
            if found.problem:
                self._report(("model",), found.problem, found.unexpected)
        elif self.pipeline is None or found != self._models:
            is_known = self.state is VersionState.READY and _counted_once(found) == _counted_once(self._models)
            self._compile(found, context, is_known=is_known)
        elif self.state is VersionState.MODEL_NOT_READY:
            self._begin_warming()

    @property
    def is_due(self) -> bool:
        """Whether the sample must run now."""
        layers = () if self.pipeline is None else self.pipeline.layers
        needs_trial = self.state is VersionState.READY and any(layer.needs_trial for layer in layers)
        return (self.state is VersionState.WARMING or needs_trial) and self.warming is None and self._backoff.is_due

    def settle(self) -> None:
        """Handles the sample's result if it is available."""
        if self.warming is None or not self.warming.done():
            return
        failure = None if self.warming.cancelled() else self.warming.exception()
        self.warming = None
        if failure is None:
            self._become_ready()
            return
        self._backoff.fail()
        self.detail = "Its sample failed; see the log for the cause."
        upstream = getattr(failure, "upstream", None)
        said = f"; the model says: {upstream.message}" if upstream is not None else ""
        self._report(("sample",), f"failed: {failure}", None if isinstance(failure, _EXPECTED) else failure, said)

    def retry_now(self) -> None:
        self._backoff.reset()

    def stop(self) -> None:
        """Cancels the running sample."""
        if self.warming is not None:
            self.warming.cancel()
            self.warming = None

    def _compile(self, models: Mapping[str, ModelConfig], context: CompileContext, *, is_known: bool) -> None:
        """``is_known``: the same models in another number of instances, for which no sample has to run again."""
        config = next(iter(models.values()))
        try:
            self.pipeline = compile_pipeline(self.name, self.spec, config, models, context)
        except PipelineMismatch as exc:
            key = ".".join(map(str, exc.location))
            detail = f"It does not match its model: {key} {exc.text}{'' if exc.text.endswith('?') else '.'}"
            self._report(exc.location, exc.text)
        except Exception as exc:
            detail = "The gateway cannot compile it; see the log for the cause."
            self._report((), f"cannot be compiled: {exc!r}", exc)
        else:
            self._models, self._logged = models, ""
            if not is_known:
                self._begin_warming()
            return
        self.stop()
        self.pipeline, self.state, self.detail = None, VersionState.MISCONFIGURED, detail

    def _begin_warming(self) -> None:
        self.stop()
        self.retry_now()
        self.state, self.detail = VersionState.WARMING, "Its sample is still running."
        if not self.spec.runs_sample:
            self._become_ready()

    def _become_ready(self) -> None:
        self.state, self.detail, self.problem, self._logged = VersionState.READY, "", "", ""

    def _report(
        self, location: tuple[str | int, ...], text: str, exc: BaseException | None = None, said: str = ""
    ) -> None:
        """Logs a problem on one line, once until the problem changes.

        ``said``: the model's own message. It may name another instance of the model at each attempt, so a different
        message alone is not logged.
        """
        where = ("pipelines", self.name, *location)
        shown = " ".join(f"{text}{said}".split())[:_LONGEST_TEXT]
        self.problem = self.file.complaint(where, shown) if self.file else f"{'.'.join(map(str, where))} {shown}"
        to_log = f"{where} {text}"
        if to_log != self._logged:
            active = " (the last valid version stays active)" if self.replaces else ""
            _log.error("%s%s", self.problem, active, exc_info=exc)
        self._logged = to_log


def _counted_once(models: Mapping[str, ModelConfig]) -> list[ModelConfig]:
    """The models as if each had one instance: a Triton that joins or leaves changes only their number."""
    return [replace(config, instance_count=1) for config in models.values()]
