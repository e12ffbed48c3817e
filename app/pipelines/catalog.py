"""The pipelines that are served now: kept in step with ``gateway.yaml`` and with the models in Triton.

A pipeline's entry in the catalog: the active version, and the version of the newest file.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from app.config.watch import FollowedFile
from app.core.engine import InferenceServer, PipelineLayer
from app.core.errors import ModelNotReady, UnknownPipeline, UpstreamUnavailable
from app.core.text import nearest
from app.pipelines.compile import CompileContext
from app.pipelines.file import GatewayFile, followed_gateway_file
from app.pipelines.models import Lookup, OipModels, look_up, read_index
from app.pipelines.pipeline import Pipeline
from app.pipelines.resolve import derived_spec
from app.pipelines.run import run_sample
from app.pipelines.spec import PipelineSpec
from app.pipelines.version import PipelineVersion, VersionState

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CatalogEntry:
    """``served`` is None until a newly added pipeline can be served for the first time.

    ``coming`` replaces ``served`` as soon as it can be served: a reload is a transaction for each pipeline.
    """

    served: PipelineVersion | None = None
    coming: PipelineVersion | None = None

    @property
    def versions(self) -> Iterator[PipelineVersion]:
        return (version for version in (self.served, self.coming) if version is not None)

    @property
    def shown(self) -> PipelineVersion:
        """The version that answers requests, or will."""
        version = self.served or self.coming
        assert version is not None
        return version

    @property
    def spec(self) -> PipelineSpec:
        return self.shown.spec

    @property
    def state(self) -> VersionState:
        return self.shown.state

    @property
    def state_detail(self) -> str | None:
        """Why the pipeline is not ready, in words for callers; None if it is ready."""
        return None if self.state is VersionState.READY else self.shown.detail

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline that answers requests."""
        return self.served.pipeline if self.served else None

    @property
    def is_required(self) -> bool:
        """Whether readiness requires this pipeline; a newly added one is required only after it has been served."""
        return self.served is not None and self.served.spec.readiness == "required"

    @property
    def change_failed(self) -> bool:
        return self.coming is not None and bool(self.coming.problem)

    def ask_for(self, version: PipelineVersion) -> None:
        """Sets the version of the newest file. An unchanged version stays, and its sample is retried at once."""
        for known in self.versions:
            if known.spec == version.spec:
                known.file = version.file
                known.retry_now()
                if known is self.served:
                    self._drop_coming()
                return
        self._drop_coming()
        if self.served is not None and self.served.pipeline is None:
            self.served.stop()
            self.served = version
        else:
            version.replaces = self.served is not None
            self.coming = version

    def settle(self) -> None:
        """Handles the results of samples, and activates the new version if it can be served."""
        for version in self.versions:
            version.settle()
        if self.coming is not None and self.coming.state is VersionState.READY:
            if self.served is not None:
                self.served.stop()
                _log.info("pipeline '%s' now uses its new version", self.coming.name)
            self.served, self.coming = self.coming, None
            self.served.replaces = False

    def stop(self) -> None:
        for version in self.versions:
            version.stop()

    def _drop_coming(self) -> None:
        if self.coming is not None:
            self.coming.stop()
            self.coming = None


SAMPLES_WAIT_S = 1.0
"""How long one call waits for samples. Slower samples continue in the background."""


@dataclass(slots=True)
class Catalog:
    """``path``: the file to follow, or None to serve every ready model by its own name."""

    engine: InferenceServer
    path: Path | None = None
    context: CompileContext = field(default_factory=CompileContext)
    triton_url: str = ""
    triton_is_up: bool = field(default=False, init=False)
    entries: dict[str, CatalogEntry] = field(default_factory=dict, init=False)
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
                entry.served, entry.coming = entry.coming, None

    def check_known(self) -> None:
        """Raises UpstreamUnavailable if only Triton could tell the pipelines, and it has never answered."""
        if self.file is None and not self.entries and not self.triton_is_up:
            raise UpstreamUnavailable("Triton cannot be reached, so the pipelines are not known yet.", was_sent=False)

    def entry(self, name: str) -> CatalogEntry:
        """Raises UnknownPipeline or UpstreamUnavailable."""
        self.check_known()
        if name not in self.entries:
            raise UnknownPipeline(f"There is no such pipeline{nearest(name, list(self.entries))[:512]}")
        return self.entries[name]

    def pipeline(self, name: str) -> Pipeline:
        """Raises UnknownPipeline or ModelNotReady."""
        entry = self.entries.get(name) or self.entry(name)
        if (pipeline := entry.pipeline) is None:
            raise ModelNotReady(f"Pipeline '{name}' is not ready: {entry.state.words}. {entry.state_detail}")
        return pipeline

    def layers_of(self, model: str) -> tuple[PipelineLayer, ...]:
        """The layers of a pipeline over the model that requests to the model by its own name use too."""
        oip = None if self.file is None else self.file.spec.oip
        if oip is None or model not in oip.models_with_layers:
            return ()
        pipelines = (entry.pipeline for entry in self.entries.values() if entry.spec.model == model)
        return next((each.layers for each in pipelines if each is not None and each.layers), ())

    @property
    def is_compiled(self) -> bool:
        """Whether the model of every required pipeline was seen."""
        return all(entry.pipeline for entry in self.entries.values() if entry.is_required)

    @property
    def is_ready(self) -> bool:
        """Whether Triton answers and every required pipeline is warm."""
        return self.triton_is_up and not self.unready

    @property
    def is_settled(self) -> bool:
        """Whether it is ready, and every change of the file is served or has failed."""
        return self.is_ready and all(entry.coming is None or entry.change_failed for entry in self.entries.values())

    @property
    def unready(self) -> dict[str, CatalogEntry]:
        """Required pipelines that are not warm."""
        return {
            name: entry
            for name, entry in self.entries.items()
            if entry.is_required and entry.state is not VersionState.READY
        }

    @property
    def reload_failed(self) -> bool:
        """Whether the file, or a pipeline of it, was changed to what cannot be used."""
        file_failed = self._followed is not None and self._followed.has_failed
        return file_failed or (self.path is not None and any(entry.change_failed for entry in self.entries.values()))

    @property
    def complaints(self) -> list[str]:
        """Returns the mismatches between the file and the available models."""
        served = (entry.served for entry in self.entries.values())
        return [
            version.problem for version in served if version is not None and version.state is VersionState.MISCONFIGURED
        ]

    async def refresh(self) -> None:
        """Follows the file and the models once."""
        await self.follow_file()
        await self.follow_models()

    async def follow_file(self) -> None:
        """Takes a changed file: what it leaves out is gone at once, what it changes comes when it can be served."""
        file = None if self._followed is None else await self._followed.read_if_changed()
        if file is not None:
            self._take(file)

    async def adopt_file(self, path: Path) -> None:
        """Follows a file that was made after the start. Raises ConfigError."""
        followed = followed_gateway_file(path)
        file = await asyncio.to_thread(followed.read_first)
        self.path, self._followed = path, followed
        self._take(file)

    def _take(self, file: GatewayFile) -> None:
        entries: dict[str, CatalogEntry] = {}
        for name, spec in file.spec.pipelines.items():
            entries[name] = self.entries.get(name) or CatalogEntry()
            entries[name].ask_for(PipelineVersion(name, spec, file))
        self._replace_entries(entries)
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
        self.oip_models.follow(lookup)
        self._settle()
        # Without a file, an unloaded model is kept until Triton's index no longer contains it.
        keys = {(entry.spec.model, entry.spec.version) for entry in self.entries.values()}
        unloaded = {name for name in self.models if name in lookup.index} if self.path is None else set()
        self.models = dict.fromkeys(unloaded, False) | {
            model: all(lookup.is_ready(key) for key in keys if key[0] == model) for model, _ in keys
        }

    async def warm_up(self) -> None:
        """Runs the samples that are due, and waits for them a while; a sample that fails is retried later.

        Each pipeline is ready as soon as its own sample is answered.
        """
        for version in self._versions():
            if version.is_due and version.pipeline is not None:
                version.warming = asyncio.create_task(run_sample(self.engine, version.pipeline, self.folder))
                version.warming.add_done_callback(lambda _: self._settle())
        if running := [version.warming for version in self._versions() if version.warming is not None]:
            await asyncio.wait(running, timeout=SAMPLES_WAIT_S)
        self._settle()

    def stop(self) -> None:
        """Stops the samples that are running."""
        for entry in self.entries.values():
            entry.stop()

    async def _look_up(self) -> Lookup:
        index = await read_index(self.engine) if self.path is None or self._exposes_all else None
        if index is not None:
            ready = sorted(name for name, state in index.items() if state.ready)
            if self.path is None:
                new = {name: CatalogEntry(coming=PipelineVersion(name, derived_spec(name))) for name in ready}
                self._replace_entries({name: self.entries.get(name) or entry for name, entry in new.items()})
            self._expose(ready)
        wanted = {(version.spec.model, version.spec.version) for version in self._versions()}
        return await look_up(self.engine, wanted | {(name, "") for name in self.oip_models.names}, index)

    @property
    def _exposes_all(self) -> bool:
        return self.file is not None and self.file.spec.oip is not None and self.file.spec.oip.models == "all"

    def _expose(self, ready: Iterable[str]) -> None:
        """``ready``: the models that Triton has ready, as far as that is known and of interest."""
        oip = None if self.file is None else self.file.spec.oip
        listed = set(ready) if self.file is None or self._exposes_all else set(() if oip is None else oip.models)
        specs = [entry.spec for entry in self.entries.values()]
        self.oip_models.expose(sorted({spec.model for spec in specs} | listed), specs)

    def _replace_entries(self, entries: dict[str, CatalogEntry]) -> None:
        for name in self.entries.keys() - entries.keys():
            self.entries[name].stop()
        self.entries = entries

    def _versions(self) -> Iterator[PipelineVersion]:
        return (version for entry in list(self.entries.values()) for version in list(entry.versions))

    def _settle(self) -> None:
        for entry in self.entries.values():
            entry.settle()

    @property
    def folder(self) -> Path:
        """What the paths in the file are relative to."""
        return self.path.parent if self.path is not None else Path()
