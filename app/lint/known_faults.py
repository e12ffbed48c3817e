"""The known faults of Triton that a repository can meet, by the version of the server.

``known_faults.yaml`` has the faults as data, and docs/reference/known-faults.md shows them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from app.core.model import Finding, ModelConfig, RepositoryModel
from app.lint.findings import Fact, KnownFault, ModelCondition, known_faults

Version = tuple[int, ...]
_MOST_NAMED = 3


def version_of(text: str) -> Version:
    """``2.51.0`` and ``2.73.0dev`` -> (2, 51), (2, 73); empty for any other text."""
    parts = text.split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdecimal() for part in parts) else ()


class FaultsMet:
    """The known faults that the models of a repository can meet."""

    def __init__(self, repository: Sequence[RepositoryModel], version: Version) -> None:
        self._version = version
        self._models = {model.folder: model for model in repository}
        meeting = {
            code: [name for name, model in self._models.items() if self._meets(fault.when, model)]
            for code, fault in known_faults().faults.items()
        }
        self._meeting = {code: names for code, names in meeting.items() if names}

    @property
    def codes(self) -> Set[str]:
        """The faults of all versions that the models can meet."""
        return self._meeting.keys()

    def findings(self) -> Iterator[Finding]:
        """One for each fault of this version with a solution, unless the gateway keeps it from Triton."""
        for code, names in self._meeting.items():
            fault = known_faults().faults[code]
            if _is_in(fault, self._version) and fault.solution and not fault.kept:
                more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
                named = ", ".join(f"'{name}'" for name in names[:_MOST_NAMED]) + more
                since = f"fixed in {fault.fixed}" if fault.fixed else f"not fixed in {known_faults().newest}"
                text = f"{fault.seen} ({named}; {since})"
                yield Finding(code, text, names[0] if len(names) == 1 else None)

    @property
    def summary(self) -> str:
        """``Triton 2.51 has 7 of the 31 known faults that these models can meet; 2.70 has 1``."""
        counts = {version: self._count(version) for version in self._releases()}
        best = min(counts, key=lambda version: (counts[version], version))
        here, kept = self._count(self._version), self._count(self._version, is_kept=True)
        text = f"Triton {_text(self._version)} has {here} of the {len(self._meeting)} known faults"
        text += " that these models can meet"
        text += f"; the gateway keeps {kept} of them from it" if kept else ""
        return f"{text}; {_text(best)} has {counts[best]}" if counts[best] < here else text

    def _releases(self) -> Sequence[Version]:
        fixed = {version_of(fault.fixed) for fault in known_faults().faults.values() if fault.fixed}
        return sorted({self._version, *(version for version in fixed if version > self._version)})

    def _count(self, version: Version, *, is_kept: bool = False) -> int:
        faults = (known_faults().faults[code] for code in self._meeting)
        return sum(_is_in(fault, version) and (not is_kept or bool(fault.kept)) for fault in faults)

    def _meets(self, condition: ModelCondition, model: RepositoryModel) -> bool:
        below = [self._models[name] for name in {*model.config.calls, *model.calls} if name in self._models]
        return (
            all(_IS[fact](model) for fact in condition.is_)
            and condition.name in {"", model.folder}
            and condition.backend in {"", model.backend or model.config.backend}
            and all(_has(model.document, path) for path in condition.has)
            and not any(_has(model.document, path) for path in condition.lacks)
            and all(any(self._meets(step, each) for each in below) for step in condition.steps)
        )


def _forks(config: ModelConfig) -> bool:
    """Whether two steps of the ensemble do not wait for each other: in a chain, each step makes the next one ready."""
    written, waiting = {spec.name for spec in config.inputs}, list(config.steps)
    while ready := [step for step in waiting if all(tensor in written for _, tensor in step.input_map)]:
        if len(ready) > 1:
            return True
        written |= {tensor for _, tensor in ready[0].output_map}
        waiting.remove(ready[0])
    return False


_IS: Mapping[Fact, Callable[[RepositoryModel], bool]] = {
    "ensemble": lambda model: model.config.is_ensemble,
    "forks": lambda model: _forks(model.config),
    "bls": lambda model: bool(model.calls),
    "decoupled": lambda model: model.config.decoupled,
    "several-instances": lambda model: model.config.instance_count > 1,
}


def _has(value: Any, path: str) -> bool:
    """Whether the configuration has the path, in any item of its lists, with the value after ``=`` if there is one."""
    if isinstance(value, list):
        return any(_has(each, path) for each in value)
    if not path or path.startswith("="):
        return path == f"={value}" if path else bool(value)
    name, _, rest = path.partition("." if "." in path else "=")
    return (
        isinstance(value, Mapping) and name in value and _has(value[name], rest if "." in path else path[len(name) :])
    )


def _is_in(fault: KnownFault, version: Version) -> bool:
    return not fault.fixed or version < version_of(fault.fixed)


def _text(version: Version) -> str:
    return ".".join(map(str, version))
