"""Reads a YAML file into typed values, and follows it. Every complaint says the line, the key and the nearest name.

``read_spec`` checks the values against a ``Section``. ``words_of`` translates pydantic's errors about values of files
and settings to plain words. ``FollowedFile`` reads a file again, in a thread, when it or a file that it names has
changed.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, Self, TypeVar, get_args

import orjson
import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from app.core.aio import Backoff
from app.core.errors import Unusable
from app.core.files import Stamp, read_regular_file, stamp_of
from app.core.text import LONGEST_NAME, nearest

MAX_BYTES = 1024 * 1024
MAX_NODES = 20_000
"""Limit of keys and values together; an alias counts with its full content."""
MAX_DEPTH = 32

_MAX_DIGITS = 64
"""Length limit of a number, because PyYAML's time grows with the square of the length."""
_MAX_WORDS = 300
_NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}

KeyPath = tuple[str, ...]
"""The keys that lead to a value, as written in the file; the indexes of a list count as keys."""

Lines = dict[KeyPath, int]


class ConfigError(Unusable):
    """A file cannot be used; the message has a line for each complaint."""


def read_document(path: Path) -> tuple[Any, Lines]:
    """The values of a YAML file and the line of each key, with limited cost for any content. Raises ConfigError."""
    content, line, cause = b"", 1, Exception()
    try:
        content = read_regular_file(path, MAX_BYTES)
        loader = _BoundedLoader(content.decode("utf-8"))
        node = loader.get_single_node()
        if node is None:
            return None, {(): 1}
        for _ in _lines_of(node, ()):
            pass  # raises for a duplicate key; the merges of the next line make further ones
        values = loader.construct_document(node)
        return values, dict(_lines_of(node, (), is_merged=True))
    except FileNotFoundError as exc:
        raise ConfigError(f"{path}: there is no such file") from exc
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc
    except UnicodeDecodeError as exc:
        cause, text, line = exc, "is not UTF-8 text", content[: exc.start].count(b"\n") + 1
    except yaml.MarkedYAMLError as exc:
        is_tab = exc.problem is not None and r"'\t'" in exc.problem
        words = " ".join(part for part in (exc.context, exc.problem) if part)
        mark = exc.problem_mark or exc.context_mark
        cause, text = exc, "a tab stands where YAML needs spaces" if is_tab else words
        line = mark.line + 1 if mark is not None else 1
    except (yaml.YAMLError, ValueError, OverflowError) as exc:
        cause, text = exc, f"is not YAML: {str(exc).partition(chr(10))[0]}"
    text = text if len(text) <= _MAX_WORDS else f"{text[:_MAX_WORDS]}..."
    raise ConfigError(f"{path}:{line}: {text}") from cause


class _BoundedLoader(yaml.SafeLoader):
    """Counts nodes and depth while it composes them, so that a hostile file is refused before it is expanded."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0
        self._depth = 0
        self._deepest = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}
        """Complete node -> the number of nodes in it, and their nesting depth."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if node not in self._sizes:
                raise yaml.MarkedYAMLError(problem="an alias contains itself", problem_mark=mark)
            nodes, depth = self._sizes[node]
            self._deepest = max(self._deepest, self._depth + depth)
            self._add(nodes, self._depth + depth, mark)
            return node
        nodes, deepest = self._nodes, self._deepest
        self._depth += 1
        self._deepest = self._depth
        self._add(1, self._depth, mark)
        node = super().compose_node(parent, index)
        assert node is not None
        self._sizes[node] = self._nodes - nodes, self._deepest - self._depth + 1
        self._depth -= 1
        self._deepest = max(self._deepest, deepest)
        return node

    def _add(self, nodes: int, depth: int, mark: yaml.Mark) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            problem = f"the file holds more than {MAX_NODES} keys and values, with its aliases counted in full"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        if depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"is nested deeper than {MAX_DEPTH} levels", problem_mark=mark)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """PyYAML's constructors raise any exception for a value that does not fit its tag."""
        if node.tag in _NUMBERS and len(node.value) > _MAX_DIGITS:
            raise yaml.MarkedYAMLError(problem="has too many digits", problem_mark=node.start_mark)
        try:
            if isinstance(node, yaml.ScalarNode):
                node.value.encode()  # a lone surrogate, which no answer can carry
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as exc:
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(problem=f"is not a valid {kind}", problem_mark=node.start_mark) from exc


def _lines_of(node: yaml.Node, key_path: KeyPath, *, is_merged: bool = False) -> Iterator[tuple[KeyPath, int]]:
    """Raises MarkedYAMLError for a key that is a list or a mapping; for a duplicate key unless ``is_merged``."""
    if not key_path:
        yield (), node.start_mark.line + 1
    children: Iterable[tuple[Any, yaml.Node, yaml.Node]] = ()
    if isinstance(node, yaml.MappingNode):
        children = ((key.value, key, child) for key, child in node.value)
    elif isinstance(node, yaml.SequenceNode):
        children = ((index, child, child) for index, child in enumerate(node.value))
    seen: set[str] = set()
    for key, key_node, child in children:
        path, mark = (*key_path, str(key)), key_node.start_mark
        if isinstance(node, yaml.MappingNode) and not isinstance(key_node, yaml.ScalarNode):
            problem = "a key is a list or a mapping instead of text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        if path[-1] in seen and not is_merged:
            raise yaml.MarkedYAMLError(problem=f"{'.'.join(path)} is used twice", problem_mark=mark)
        seen.add(path[-1])
        yield path, mark.line + 1
        yield from _lines_of(child, path, is_merged=is_merged)


_WITH_UNIT = re.compile(r"[0-9.]+ ?[a-zA-Z]{1,8}")
_WORDS = {
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "timezone_aware": "must have a time zone, such as 2027-01-01T00:00:00Z",
    "too_short": "must have at least {min_length} entry",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "string_pattern_mismatch": "must match the pattern {pattern}",
}


def words_of(error: ErrorDetails) -> str:
    """Translates an error of pydantic to plain words: the end of a sentence about the value."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        valid = re.findall(r"'([^']*)'", context["expected"])
        return f"not an allowed value{nearest(str(error['input']), valid)}"
    if kind in ("model_type", "dict_type") and error["input"] is None:
        return "it is empty; write its keys below it, indented"
    if kind.startswith(("float", "int")) and _WITH_UNIT.fullmatch(str(error["input"])):
        return "must be a number without a unit"
    words = _WORDS.get(kind)
    return error["msg"].removeprefix("Value error, ") if words is None else words.format(**context)


def _json_value(value: Any) -> Any:
    """Raises ValueError."""
    try:
        written = orjson.loads(orjson.dumps(value))
    except TypeError as exc:
        raise ValueError(f"is not valid in JSON: {exc}") from exc
    if written != value:
        raise ValueError("is not valid in JSON: put dates in quotes, and use finite numbers only")
    return value


JsonValue = Annotated[Any, AfterValidator(_json_value)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]


class Section(BaseModel):
    """The base class of the sections of ``gateway.yaml`` and of the file of API keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the keys of the section together. Only the first is reported."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_fault(self) -> Self:
        for fault in self.faults():
            raise ValueError(fault)
        return self


Location = tuple[str | int, ...]
Spec = TypeVar("Spec", bound=BaseModel)

_MOST_ERRORS = 32


def read_spec(path: Path, spec: type[Spec]) -> tuple[Spec, Lines]:
    """The values of a file, and the line of each key.

    Raises ConfigError with one line for each invalid value, regardless of the number of types tried, up to a limit.
    """
    values, lines = read_document(path)
    if values is None:
        raise ConfigError(f"{path}:1: the file is empty: begin it with `{next(iter(spec.model_fields))}:`")
    try:
        return spec.model_validate(values), lines
    except ValidationError as exc:
        errors, more = exc.errors()[:_MOST_ERRORS], exc.error_count() - _MOST_ERRORS
        complaints = dict.fromkeys(_complaint_of(path, spec, lines, error) for error in errors)
        rest = [f"{path}: and {more} more"] if more > 0 else []
        raise ConfigError("\n".join([*complaints, *rest])) from exc


def complaint_at(path: Path, lines: Lines, location: Location, text: str) -> str:
    known = _known_part(lines, location)
    where = ".".join(str(part)[:LONGEST_NAME] for part in location) or "the file"
    return f"{path}:{lines.get(tuple(map(str, known)), 1)}: {where} {text}"


def _complaint_of(path: Path, spec: type[BaseModel], lines: Lines, error: ErrorDetails) -> str:
    location = tuple(part for part in error["loc"] if part != "[key]")
    if error["type"] == "extra_forbidden":
        section: Any = spec
        for part in location[:-1]:  # of a mapping or a list, the class of its values
            field = getattr(section, "model_fields", {}).get(part)
            section = section[0] if isinstance(section, list) else field and _class_in(field.annotation)
        keys = list(getattr(section, "model_fields", ()))
        text = "is not a known key" + nearest(str(location[-1])[:LONGEST_NAME], keys)
    elif error["type"] == "missing":
        text = f"is missing: add `{location[-1]}:`"
    else:
        text = f"is wrong: {words_of(error)}"
        location = _known_part(lines, location)
    return complaint_at(path, lines, location, text)


def _known_part(lines: Lines, location: Location) -> Location:
    """Returns the part of a location that is in the file. After it, pydantic adds the types that it tried."""
    parts = tuple(map(str, location))
    return next((location[:n] for n in range(len(location), 0, -1) if parts[:n] in lines), ())


def _class_in(annotation: Any) -> Any:
    """``X`` or ``X | None`` -> X; ``dict[_, X]`` and ``list[X]`` -> [X]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return [inner] if getattr(annotation, "__origin__", None) in (dict, list) else inner
        if found := _class_in(inner):
            return found
    return None


Content = TypeVar("Content")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class FollowedFile(Generic[Content]):
    """``read`` may raise ConfigError. ``name``: in the log. ``has_failed``: the newest content cannot be used.

    ``others_of``: the files that ``read`` read because the content names them, with their stamps before that.
    """

    path: Path
    read: Callable[[Path], Content]
    name: str
    others_of: Callable[[Content], Mapping[Path, Stamp]] = lambda _: {}
    has_failed: bool = False
    _stamps: Mapping[Path, Stamp] = field(default_factory=dict)
    _problem: str = ""
    _backoff: Backoff = field(default_factory=Backoff)

    def read_first(self) -> Content:
        """Raises ConfigError."""
        stamp, content = stamp_of(self.path), self.read(self.path)
        self._stamps = {**self.others_of(content), self.path: stamp}
        return content

    def look(self) -> Content | None:
        """None where nothing changed or the content cannot be used; what failed is retried. Raises nothing.

        A slow file system delays it: call it in a thread.
        """
        stamps = {path: stamp_of(path) for path in (self.path, *self._stamps)}
        if stamps == self._stamps and not (self.has_failed and self._backoff.is_due):
            return None
        if stamps != self._stamps:
            self._backoff.reset()
        try:
            content = self.read(self.path)
        except ConfigError as exc:
            self._fail(stamps, str(exc))
        except Exception as exc:
            self._fail(stamps, f"{self.path}: {type(exc).__name__}: {exc}", exc)
        else:
            self._stamps = {**self.others_of(content), self.path: stamps[self.path]}
            self.has_failed, self._problem = False, ""
            return content
        return None

    def _fail(self, stamps: Mapping[Path, Stamp], problem: str, exc: Exception | None = None) -> None:
        """Logs a problem once, until another takes its place."""
        self._stamps, self.has_failed = stamps, True
        self._backoff.fail()
        if problem != self._problem:
            text = "%s has changed but is invalid; the old one stays active: %s"
            _log.error(text, self.name, problem, exc_info=exc)
        self._problem = problem
