"""A pipeline's entry in the catalog: the active version, and the version of the newest file."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from app.pipelines.form import Form, State
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import PipelineSpec

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Entry:
    """``served`` is None until a newly added pipeline can be served for the first time.

    ``coming`` replaces ``served`` as soon as it can be served: a reload is a transaction for each pipeline.
    """

    served: Form | None = None
    coming: Form | None = None

    @property
    def forms(self) -> Iterator[Form]:
        return (form for form in (self.served, self.coming) if form is not None)

    @property
    def spec(self) -> PipelineSpec:
        return self._shown.spec

    @property
    def state(self) -> State:
        return self._shown.state

    @property
    def state_detail(self) -> str | None:
        """Why the pipeline is not ready, in a form for callers; None if it is ready."""
        return None if self.state is State.READY else self._shown.detail

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

    def ask_for(self, form: Form) -> None:
        """Sets the version of the newest file. An unchanged version stays, and its sample is retried at once."""
        for known in self.forms:
            if known.spec == form.spec:
                known.file = form.file
                known.retry_now()
                if known is self.served:
                    self._drop_coming()
                return
        self._drop_coming()
        if self.served is not None and self.served.pipeline is None:
            self.served.stop()
            self.served = form
        else:
            form.replaces = self.served is not None
            self.coming = form

    def settle(self) -> None:
        """Handles the results of samples, and activates the new version if it can be served."""
        for form in self.forms:
            form.settle()
        if self.coming is not None and self.coming.state is State.READY:
            if self.served is not None:
                self.served.stop()
                _log.info("pipeline '%s' now uses its new version", self.coming.name)
            self.served, self.coming = self.coming, None
            self.served.replaces = False

    def stop(self) -> None:
        for form in self.forms:
            form.stop()

    def _drop_coming(self) -> None:
        if self.coming is not None:
            self.coming.stop()
            self.coming = None

    @property
    def _shown(self) -> Form:
        form = self.served or self.coming
        assert form is not None
        return form
