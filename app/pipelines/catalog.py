"""The pipelines that are served now: kept in step with ``gateway.yaml`` and with the models in Triton.

A version of a pipeline finds its model, is compiled, and runs its sample until it can be served.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from app.config.document import FollowedFile
from app.config.mismatch import PipelineMismatch
from app.core.aio import Backoff
from app.core.answer import part_of
from app.core.engine import Document, Engine, InferenceServer, PipelineLayer
from app.core.errors import GatewayError, ModelNotReady, UnknownModel, UnknownPipeline, UpstreamUnavailable
from app.core.inference import Deadline
from app.core.model import ModelConfig, ModelState
from app.core.text import nearest
from app.pipelines.examples import body_of, trial_requests
from app.pipelines.file import GatewayFile, derived_spec, followed_gateway_file
from app.pipelines.models import Lookup, Missing, OipModels, look_up, read_index
from app.pipelines.pipeline import CompileContext, Pipeline
from app.pipelines.run import Collector, run
from app.pipelines.spec import PipelineSpec
from app.steps.plan import VERSION, VERSIONS

SAMPLES_WAIT_S = 1.0
"""How long one call waits for samples. Slower samples continue in the background."""
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

    ``file`` is None if the pipeline is derived from a model. ``compiled`` is None until its model is there.
    """

    name: str
    spec: PipelineSpec
    file: GatewayFile | None = None
    is_served: bool = False
    """Whether it answers requests. A newly added pipeline does so as soon as it has been ready once."""
    replaces: bool = False
    """Whether an older version of the pipeline stays active until this version can be served."""
    state: VersionState = VersionState.MODEL_NOT_READY
    detail: str = "Its model has not been seen yet."
    problem: str = ""
    compiled: Pipeline | None = None
    warming: "asyncio.Task[None] | None" = None
    """The task that runs the sample; its exception is the sample's failure."""
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    """Those for which it was compiled."""
    _backoff: Backoff = field(default_factory=Backoff)
    _logged: str = ""
    """The last problem in the log, without the model's own message."""

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline that answers requests."""
        return self.compiled if self.is_served else None

    @property
    def state_detail(self) -> str | None:
        """Why the pipeline is not ready, in words for callers; None if it is ready."""
        return None if self.state is VersionState.READY else self.detail

    @property
    def is_required(self) -> bool:
        """Whether readiness requires this pipeline."""
        return self.is_served and self.spec.readiness == "required"

    def follow(self, lookup: Lookup, context: CompileContext) -> None:
        """Compiles the version when its models are first available, and again when a model changes."""
        found = lookup.models_of(*self.spec.called)
        if isinstance(found, Missing):
            self.stop()
            self.state, self.detail = VersionState.MODEL_NOT_READY, found.detail
            if found.problem:
                self._report(("model",), found.problem, found.unexpected)
        elif self.compiled is None or found != self.models:
            # A Triton that joins or leaves changes only the number of instances: no sample has to run again.
            one, other = ([replace(each, instance_count=1) for each in x.values()] for x in (found, self.models))
            is_known = self.state is VersionState.READY and one == other
            try:
                self.compiled = Pipeline(self.name, self.spec, self.spec.config_of(self.name, found), found, context)
            except Exception as exc:
                self.stop()
                self.compiled, self.state = None, VersionState.MISCONFIGURED
                if isinstance(exc, PipelineMismatch):
                    text = f"{'.'.join(map(str, exc.location))} {exc.text}{'' if exc.text.endswith('?') else '.'}"
                    self.detail = f"It does not match its model: {text}"
                    self._report(exc.location, exc.text)
                else:
                    self.detail = "The gateway cannot compile it; see the log for the cause."
                    self._report((), f"cannot be compiled: {exc!r}", exc)
                return
            self.models, self._logged = found, ""
            if not is_known:
                self._begin_warming()
        elif self.state is VersionState.MODEL_NOT_READY:
            self._begin_warming()

    @property
    def is_due(self) -> bool:
        """Whether the sample must run now."""
        layers = () if self.compiled is None else self.compiled.layers
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


@dataclass(slots=True)
class Catalog:
    """``path``: the file to follow, or None to serve every ready model by its own name."""

    engine: InferenceServer
    path: Path | None = None
    context: CompileContext = field(default_factory=CompileContext)
    triton_url: str = ""
    runs: Engine | None = None
    """Runs the samples; None: ``engine``."""
    triton_is_up: bool = field(default=False, init=False)
    entries: dict[str, PipelineVersion] = field(default_factory=dict, init=False)
    """The versions that answer requests, or will once they are ready."""
    _coming: dict[str, PipelineVersion] = field(default_factory=dict, init=False)
    """The version of each pipeline that replaces its entry once it can be served. A reload is a transaction."""
    file: GatewayFile | None = field(default=None, init=False)
    """The last valid version."""
    models: dict[str, bool] = field(default_factory=dict, init=False)
    """The models that are served, and whether Triton has each ready."""
    oip_models: OipModels = field(default_factory=OipModels, init=False)
    """The models that are served under ``/v2``."""
    _followed: FollowedFile[GatewayFile] | None = field(default=None, init=False)

    def load_file(self) -> None:
        """Reads the file for the first time. Raises ConfigError."""
        if self.path is not None:
            self._followed = followed_gateway_file(self.path)
            self._take(self._followed.read_first())
            for entry in self.entries.values():
                entry.is_served = True

    def check_known(self) -> None:
        """Raises UpstreamUnavailable if only Triton could tell the pipelines, and it has never answered."""
        if self.file is None and not self.entries and not self.triton_is_up:
            raise UpstreamUnavailable("Triton cannot be reached, so the pipelines are not known yet.", was_sent=False)

    def entry(self, name: str) -> PipelineVersion:
        """Raises UnknownPipeline or UpstreamUnavailable."""
        self.check_known()
        if name not in self.entries:
            raise UnknownPipeline(f"There is no such pipeline{nearest(name, list(self.entries))[:512]}")
        return self.entries[name]

    def pipeline(self, name: str) -> Pipeline:
        """Raises UnknownPipeline or ModelNotReady."""
        entry = self.entries.get(name) or self.entry(name)
        if entry.compiled is None or not entry.is_served:
            raise ModelNotReady(f"Pipeline '{name}' is not ready: {entry.state.words}. {entry.state_detail}")
        return entry.compiled

    def layers_of(self, model: str) -> tuple[PipelineLayer, ...]:
        """The layers of a pipeline over the model that requests to the model by its own name use too."""
        oip = None if self.file is None else self.file.spec.oip
        if oip is None or model not in oip.models_with_layers:
            return ()
        pipelines = (entry.pipeline for entry in self.entries.values() if entry.spec.model == model)
        return next((each.layers for each in pipelines if each is not None and each.layers), ())

    @property
    def _of_steps(self) -> dict[str, PipelineVersion]:
        """The pipelines whose steps are a model with their name. It hides a model of Triton with that name."""
        return {name: entry for name, entry in self.entries.items() if entry.spec.steps is not None}

    async def model_states(self) -> list[ModelState]:
        """Triton's index, and the models that are not Triton's."""
        own = self._of_steps
        states = [ModelState(name, VERSION, entry.state is VersionState.READY) for name, entry in own.items()]
        return [*(each for each in await self.engine.models() if each.name not in own), *states]

    async def model_ready(self, model: str, version: str = "") -> bool:
        """Raises ModelNotReady."""
        if (own := self._of_steps.get(model)) is not None:
            return own.state is VersionState.READY and version in VERSIONS
        return await self.engine.model_ready(model, version)

    async def document(self, document: Document, model: str, version: str = "") -> Mapping[str, Any]:
        """Raises UnknownModel or ModelNotReady."""
        own = self._of_steps.get(model)
        if model not in self.oip_models or (own is not None and version not in VERSIONS):
            raise UnknownModel.named(model, version)
        if own is not None:
            return self.oip_models.model(model).document(document)
        return await self.engine.document(document, model, version)

    def absences(self, spec: PipelineSpec) -> dict[str, str]:
        """Where a model of the pipeline is not called, and why not, by the Triton's address."""
        return {address: why for key in spec.called for address, why in self.engine.absences(*key).items()}

    @property
    def is_compiled(self) -> bool:
        """Whether the model of every required pipeline was seen."""
        return all(entry.compiled for entry in self.entries.values() if entry.is_required)

    @property
    def is_ready(self) -> bool:
        """Whether Triton answers and every required pipeline is warm."""
        return self.triton_is_up and not self.unready

    @property
    def is_settled(self) -> bool:
        """Whether it is ready, and every change of the file is served or has failed."""
        return self.is_ready and all(version.problem for version in self._versions() if not version.is_served)

    @property
    def unready(self) -> dict[str, PipelineVersion]:
        """Required pipelines that are not warm."""
        required = {name: entry for name, entry in self.entries.items() if entry.is_required}
        return {name: entry for name, entry in required.items() if entry.state is not VersionState.READY}

    @property
    def reload_failed(self) -> bool:
        """Whether the file, or a pipeline of it, was changed to what cannot be used."""
        file_failed = self._followed is not None and self._followed.has_failed
        problems = [version.problem for version in self._versions() if not version.is_served]
        return file_failed or (self.path is not None and any(problems))

    @property
    def complaints(self) -> list[str]:
        """Returns the mismatches between the file and the available models."""
        served = (entry for entry in self.entries.values() if entry.is_served)
        return [entry.problem for entry in served if entry.state is VersionState.MISCONFIGURED]

    async def refresh(self) -> None:
        """Follows the file and the models once."""
        await self.follow_file()
        await self.follow_models()

    async def follow_file(self) -> None:
        """Takes a changed file: what it leaves out is gone at once, what it changes comes when it can be served."""
        file = None if self._followed is None else await asyncio.to_thread(self._followed.look)
        if file is not None:
            self._take(file)

    async def adopt_file(self, path: Path) -> None:
        """Follows a file that was made after the start. Raises ConfigError."""
        followed = followed_gateway_file(path)
        file = await asyncio.to_thread(followed.read_first)
        self.path, self._followed = path, followed
        self._take(file)

    def _take(self, file: GatewayFile) -> None:
        """An unchanged version stays, and its sample is retried at once."""
        entries, coming = dict[str, PipelineVersion](), dict[str, PipelineVersion]()
        for name, spec in file.spec.pipelines.items():
            entry, waiting = self.entries.get(name), self._coming.get(name)
            known = next((each for each in (entry, waiting) if each is not None and each.spec == spec), None)
            version = known or PipelineVersion(name, spec, file)
            version.file = file
            version.retry_now()
            if entry is None or version is entry:
                entries[name] = version
            elif entry.compiled is None or not entry.is_served:
                entries[name], version.is_served, version.replaces = version, entry.is_served, False
            else:
                entries[name], coming[name], version.replaces = entry, version, True
        self._replace(entries, coming)
        self.file = file
        self._expose(self.oip_models.names)

    async def follow_models(self) -> None:
        """Compiles what is new or whose models changed. What cannot be followed now is tried again at the next call."""
        was_up, self.triton_is_up = self.triton_is_up, await self.engine.is_live()
        named = f"Triton at {self.triton_url}" if self.triton_url else "Triton"
        if was_up and not self.triton_is_up:
            _log.error("%s stopped answering", named)
        elif self.triton_is_up and not was_up:
            _log.info("%s answers", named)
        lookup = await self._look_up() if self.triton_is_up else Lookup()
        for version in self._versions():
            version.follow(lookup, self.context)
        self._settle()
        compiled = ((name, entry.compiled, entry.models) for name, entry in self._of_steps.items())
        made = {name: {name: each.config, **models} for name, each, models in compiled if each}
        self.oip_models.follow(lookup, made)
        # Without a file, an unloaded model is kept until Triton's index no longer contains it.
        keys = {key for entry in self.entries.values() for key in entry.spec.called}
        unloaded = {name for name in self.models if name in lookup.index} if self.path is None else set()
        self.models = dict.fromkeys(unloaded, False) | {
            model: all(isinstance(lookup.answers.get(key), ModelConfig) for key in keys if key[0] == model)
            for model, _ in keys
        }

    async def warm_up(self) -> None:
        """Runs the samples that are due, and waits for them a while; a sample that fails is retried later.

        Each pipeline is ready as soon as its own sample is answered.
        """
        for version in self._versions():
            if version.is_due and version.compiled is not None:
                version.warming = asyncio.create_task(self._run_sample(version.compiled))
                version.warming.add_done_callback(lambda _: self._settle())
        if running := [version.warming for version in self._versions() if version.warming is not None]:
            await asyncio.wait(running, timeout=SAMPLES_WAIT_S)
        self._settle()

    async def _run_sample(self, pipeline: Pipeline) -> None:
        """Runs a pipeline's sample before the pipeline counts as ready: no caller waits for a model's first-time work.

        With ``batch``, only its first part. Then runs the trials of the pipeline's layers. Raises GatewayError,
        OSError, TypeError or ValueError.
        """
        body = await asyncio.to_thread(body_of, pipeline, pipeline.spec.sample or {}, self.folder)
        request = msgspec.structs.replace(pipeline.probe_of(body), is_probe=True)
        for layer in pipeline.layers:
            request = layer.extended(request)
        if pipeline.batch is not None:
            request = part_of(request, range(pipeline.call_items))
        stream, timeout_s = pipeline.spec.stream, pipeline.timeout_s
        if stream is not None:  # its first output may wait behind the requests of callers
            timeout_s = max(timeout_s, stream.first_output_s or 0.0)
        engine = self.runs or self.engine
        call = engine.infer_stream if pipeline.config.decoupled else engine.infer
        await run(Collector(pipeline, request, is_whole=True), call(request, Deadline.after(timeout_s)))
        for layer in pipeline.layers:
            declared, varied = await asyncio.to_thread(trial_requests, pipeline, self.folder)
            await layer.run_trial(self.engine, declared, varied, timeout_s)

    def stop(self) -> None:
        """Stops the samples that are running."""
        for version in self._versions():
            version.stop()

    async def _look_up(self) -> Lookup:
        index = await read_index(self.engine) if self.path is None or self._exposes_all else None
        if index is not None:
            ready = sorted(name for name, state in index.items() if state.ready)
            if self.path is None:
                known = self.entries
                self._replace({n: known.get(n) or PipelineVersion(n, derived_spec(n)) for n in ready}, {})
            self._expose(ready)
        wanted = {key for version in self._versions() for key in version.spec.called}
        wanted |= {(name, "") for name in self.oip_models.names if name not in self._of_steps}
        return await look_up(self.engine, wanted, index)

    @property
    def _exposes_all(self) -> bool:
        return self.file is not None and self.file.spec.oip is not None and self.file.spec.oip.models == "all"

    def _expose(self, ready: Iterable[str]) -> None:
        """``ready``: the models that Triton has ready, as far as that is known and of interest."""
        oip = None if self.file is None else self.file.spec.oip
        listed = set(ready) if self.file is None or self._exposes_all else set(() if oip is None else oip.models)
        specs = [entry.spec for entry in self.entries.values()]
        used = {spec.model for spec in specs if spec.steps is None or self._exposes_all}
        self.oip_models.expose(sorted(used | listed), specs)

    def _replace(self, entries: dict[str, PipelineVersion], coming: dict[str, PipelineVersion]) -> None:
        for version in {*self._versions()} - {*entries.values(), *coming.values()}:
            version.stop()
        self.entries, self._coming = entries, coming

    def _versions(self) -> list[PipelineVersion]:
        return [*self.entries.values(), *self._coming.values()]

    def _settle(self) -> None:
        """Handles the results of samples, and activates the new versions that can be served."""
        for version in self._versions():
            version.settle()
            if version.state is VersionState.READY and not version.is_served:
                if self._coming.pop(version.name, None) is not None:
                    self.entries[version.name].stop()
                    _log.info("pipeline '%s' now uses its new version", version.name)
                self.entries[version.name] = version
                version.is_served, version.replaces = True, False

    @property
    def folder(self) -> Path:
        """The folder of the file's relative paths."""
        return self.path.parent if self.path is not None else Path()
