"""The pipelines that are served now: kept in step with ``gateway.yaml`` and with the models in Triton."""

import asyncio
import base64
import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import orjson

from app.domain.deadline import Deadline
from app.domain.engine import Engine
from app.domain.errors import GatewayError, ModelNotReady, UnknownPipeline
from app.domain.model import ModelConfig
from app.pipelines.compile import PipelineMismatch, Surroundings, compile_pipeline, derived_spec
from app.pipelines.file import ConfigError, GatewayFile, nearest, read_gateway_file
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import run
from app.pipelines.spec import PipelineSpec

_log = logging.getLogger(__name__)


class State(StrEnum):
    READY = "ready"
    WARMING = "warming"
    MODEL_NOT_READY = "model_not_ready"
    MISCONFIGURED = "misconfigured"

    @property
    def words(self) -> str:
        return self.value.replace("_", " ")


@dataclass(slots=True)
class Entry:
    """One pipeline's place in the catalog; ``pipeline`` is None until its model was seen ready."""

    spec: PipelineSpec
    state: State = State.MODEL_NOT_READY
    pipeline: Pipeline | None = None
    complaint: str = ""

    def complain(self, text: str) -> None:
        """Logged when it is new."""
        if text != self.complaint:
            _log.error(text)
        self.complaint = text


@dataclass(slots=True)
class Catalog:
    """``path``: the file to follow, or None to serve every ready model by its own name."""

    engine: Engine
    path: Path | None = None
    surroundings: Surroundings = field(default_factory=Surroundings)
    triton_is_up: bool = field(default=False, init=False)
    reload_failed: bool = field(default=False, init=False)
    entries: dict[str, Entry] = field(default_factory=dict, init=False)
    _file: GatewayFile | None = field(default=None, init=False)
    _stamp: tuple[int, int] = field(default=(0, 0), init=False)

    def load_file(self) -> None:
        """Read the file for the first time. Raises ConfigError."""
        if self.path is not None:
            self._stamp = _stamp_of(self.path)
            self._file = read_gateway_file(self.path)
            self.entries = {name: Entry(spec) for name, spec in self._file.spec.pipelines.items()}

    def pipeline(self, name: str) -> Pipeline:
        """Raises UnknownPipeline or ModelNotReady."""
        entry = self.entries.get(name)
        if entry is None:
            raise UnknownPipeline(f"There is no such pipeline{nearest(name, list(self.entries))[:512]}")
        if entry.pipeline is None:
            raise ModelNotReady(f"Pipeline '{name}' is not ready: {entry.state.words}.")
        return entry.pipeline

    @property
    def is_compiled(self) -> bool:
        """Whether the model of every required pipeline was seen."""
        return all(entry.pipeline for entry in self.entries.values() if entry.spec.readiness == "required")

    @property
    def is_ready(self) -> bool:
        """Whether Triton answers and every required pipeline is warm."""
        return self.triton_is_up and not self.unready

    @property
    def unready(self) -> dict[str, Entry]:
        """Required pipelines that are not warm."""
        return {
            name: entry
            for name, entry in self.entries.items()
            if entry.spec.readiness == "required" and entry.state is not State.READY
        }

    async def refresh(self) -> None:
        """Follow the file and the models; what cannot be followed now is tried again at the next call."""
        self.triton_is_up = await self.engine.is_live()
        await self._follow_file()
        await self._follow_repository()
        for name, entry in list(self.entries.items()):
            await self._refresh_entry(name, entry, self._file)

    async def warm_up(self) -> None:
        """Run the samples of the pipelines that are not warm yet; those that fail are tried again at the next call."""
        await self._warm_up_all(self.entries.values())

    @property
    def file(self) -> GatewayFile | None:
        """The file that is followed, as it was last read well."""
        return self._file

    @property
    def complaints(self) -> list[str]:
        """What does not fit between the file and the models."""
        return [entry.complaint for entry in self.entries.values() if entry.state is State.MISCONFIGURED]

    async def _follow_file(self) -> None:
        """A change is used as a whole or not at all, and only when its pipelines are compiled and warm."""
        if self.path is None or (stamp := _stamp_of(self.path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            file = read_gateway_file(self.path)
            self.entries = await self._entries_of(file)
        except ConfigError as exc:
            self.reload_failed = True
            _log.error("gateway.yaml was changed and cannot be used; the old one stays: %s", exc)
        else:
            self._file, self.reload_failed = file, False

    async def _entries_of(self, file: GatewayFile) -> dict[str, Entry]:
        """Those that did not change stay as they are. Raises ConfigError where one does not fit its model."""
        entries = {name: self._kept_or_new(name, spec) for name, spec in file.spec.pipelines.items()}
        changed = {name: entry for name, entry in entries.items() if entry is not self.entries.get(name)}
        for name, entry in changed.items():
            await self._refresh_entry(name, entry, file)
        if misfits := [entry.complaint for entry in changed.values() if entry.state is State.MISCONFIGURED]:
            raise ConfigError("\n".join(misfits))
        await self._warm_up_all(changed.values())
        return entries

    def _kept_or_new(self, name: str, spec: PipelineSpec) -> Entry:
        entry = self.entries.get(name)
        return entry if entry is not None and entry.spec == spec else Entry(spec)

    async def _follow_repository(self) -> None:
        if self.path is not None or not self.triton_is_up:
            return
        try:
            ready = {model.name for model in await self.engine.models() if model.ready}
        except GatewayError as exc:
            _log.warning("Triton's models could not be listed: %s", exc.detail)
            return
        self.entries = {name: self.entries.get(name) or Entry(derived_spec(name)) for name in sorted(ready)}

    async def _refresh_entry(self, name: str, entry: Entry, file: GatewayFile | None) -> None:
        try:
            if not await self.engine.model_ready(entry.spec.model, entry.spec.version):
                entry.state = State.MODEL_NOT_READY
                return
            config = await self.engine.model_config(entry.spec.model, entry.spec.version)
            if entry.pipeline is None or entry.pipeline.config != config:
                self._compile(name, entry, config, await self._models_of(config), file)
            elif entry.state is State.MODEL_NOT_READY:
                entry.state = State.WARMING
        except GatewayError:
            entry.state = State.MODEL_NOT_READY

    def _compile(
        self, name: str, entry: Entry, config: ModelConfig, models: dict[str, ModelConfig], file: GatewayFile | None
    ) -> None:
        try:
            entry.pipeline = compile_pipeline(name, entry.spec, config, models, self.surroundings)
            entry.state, entry.complaint = State.WARMING, ""
        except PipelineMismatch as exc:
            entry.pipeline, entry.state = None, State.MISCONFIGURED
            location = ("pipelines", name, *exc.location)
            entry.complain(file.complaint(location, exc.text) if file else f"{name}: {exc.text}")

    async def _models_of(self, config: ModelConfig) -> dict[str, ModelConfig]:
        """The models that a request runs through, this one included; of a BLS model's, those that it declares."""
        models = {config.name: config}
        waiting = [config]
        while waiting:
            caller = waiting.pop()
            for name in caller.calls:
                if name in models:
                    continue
                with contextlib.suppress(*([ModelNotReady] if name in caller.bls_calls else [])):
                    models[name] = await self.engine.model_config(name)
                    waiting.append(models[name])
        return models

    async def _warm_up_all(self, entries: Iterable[Entry]) -> None:
        cold = [(entry, entry.pipeline) for entry in entries if entry.state is State.WARMING]
        await asyncio.gather(*(self._warm_up(entry, pipeline) for entry, pipeline in cold if pipeline is not None))

    async def _warm_up(self, entry: Entry, pipeline: Pipeline) -> None:
        """Run the sample once, so that no caller waits for what a model does only the first time."""
        if pipeline.spec.sample is None or not pipeline.spec.warmup:
            entry.state = State.READY
            return
        try:
            request = pipeline.request_of_json(self.sample_body(pipeline))
            await run(self.engine, pipeline, request, Deadline.after(pipeline.timeout_s))
            entry.state, entry.complaint = State.READY, ""
        except (GatewayError, OSError, TypeError, ValueError) as exc:
            entry.complain(f"pipeline '{pipeline.name}' failed on its sample: {exc}")

    def sample_body(self, pipeline: Pipeline) -> bytes:
        """The sample as the JSON body of a request, files read from beside ``gateway.yaml``.

        Raises OSError for a file that cannot be read, TypeError or ValueError for a value that has no JSON form.
        """
        folder = self.path.parent if self.path is not None else Path()
        files = {field.name for field in pipeline.inputs if field.is_file}
        return orjson.dumps(
            {
                name: base64.b64encode((folder / value).read_bytes()).decode() if name in files else value
                for name, value in (pipeline.spec.sample or {}).items()
            }
        )


def _stamp_of(path: Path) -> tuple[int, int]:
    """Modification time and size; zeros while the file is away, as for a moment when it is replaced."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)
