"""The order of imports (decision 1), and the modules that may use gRPC and settings."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.routes import DIALECTS

ROOT = Path(__file__).parents[1]
_ALLOWED = """
grpc:
core:
coalescing: core
http1: core
launcher: core
llm: core
shared_memory: core
config: core
admission: core config
triton: grpc launcher shared_memory core config
codecs: core
sessions: core config
steps: core config codecs
pipelines: core coalescing config codecs llm sessions steps
lint: core config codecs pipelines steps
streams: core
observability: core
api: core http1 config admission codecs llm pipelines lint streams sessions observability
console: core api
process: core coalescing config grpc launcher shared_memory admission triton pipelines lint streams sessions steps \
observability http1 api console check routes settings
"""
LAYERS = {name: set(allowed.split()) for name, allowed in re.findall(r"(\w+):(.*)", _ALLOWED)}
"""The packages and modules of ``app`` that a package may import. Modules of ``app`` itself may import all."""

CLOSED_ROOMS = {"coalescing", "grpc", "http1", "launcher", "llm", "shared_memory"}
"""Packages that know nothing of the gateway: each could be published alone."""

PAGE_WITH_THE_ORDER = "docs/explanation/architecture.md"
READ_SETTINGS = {"settings", "routes", "cli", "process"}
MODULES = sorted((ROOT / "app").rglob("*.py"))
STARTER = ROOT / "app" / "starter"
"""The files of `triton-gateway init`: a model is a module of its own."""


def imports_of(path: Path) -> Iterator[str]:
    """Yields every module that a file imports, including imports inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield f"{node.module}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parts_of(path: Path) -> tuple[str, ...]:
    """Returns ``("triton", "codec")`` for ``app/triton/codec.py``."""
    return path.relative_to(ROOT / "app").with_suffix("").parts


MOST_LINES = {
    "admission": 1170,
    "api": 8430,
    "codecs": 840,
    "coalescing": 670,
    "config": 400,
    "console": 10,
    "core": 1880,
    "grpc": 1270,
    "http1": 1280,
    "launcher": 1230,
    "lint": 800,
    "llm": 1440,
    "observability": 960,
    "pipelines": 4100,
    "process": 1380,
    "sessions": 430,
    "shared_memory": 750,
    "starter": 70,
    "steps": 990,
    "streams": 1460,
    "triton": 3640,
}
"""The ceiling of each package. Lower it after a removal; whoever raises it says why in decision 1."""
MOST_LINES_OUTSIDE_PACKAGES = 1270


def test_the_map_of_the_house_has_at_most_120_lines() -> None:
    assert len((ROOT / "docs/explanation/architecture.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("path", MODULES, ids=lambda path: "/".join(parts_of(path)))
def test_imports_follow_the_order_of_layers(path: Path) -> None:
    package, *rest = parts_of(path)
    for name in imports_of(path):
        top, *inner = name.split(".")
        if top == "app" and inner and rest:
            assert inner[0] in LAYERS[package] | {package} or inner == ["__version__"], f"{package} imports {name}"
        if top in {"grpc", "tritonclient"}:
            assert package == "triton", f"only app/triton may import {top}, not {path.name}"
        if name.startswith("app.settings"):
            assert package in READ_SETTINGS, f"{path.name} reads settings"


def test_a_page_shows_the_order_of_layers() -> None:
    """Everything that ``LAYERS`` allows is printed left of the package, or in the last group."""
    (order,) = re.findall(r"core <- [^`\n]*", (ROOT / PAGE_WITH_THE_ORDER).read_text())
    groups = [re.findall(r"\w+", group) for group in order.split("<-")]
    place = {name: number for number, group in enumerate(groups) for name in group}
    last = len(groups) - 1
    for package, allowed in LAYERS.items():
        wrong = {name for name in allowed if place.get(name, last) >= place[package] != last}
        assert not wrong, f"{PAGE_WITH_THE_ORDER} does not show that {package} may import {wrong}"


@pytest.mark.parametrize("room", sorted(CLOSED_ROOMS))
def test_a_closed_room_needs_only_core_and_has_its_own_page_and_tests(room: str) -> None:
    assert LAYERS[room] <= {"core"}
    assert len((ROOT / "app" / room / "README.md").read_text().splitlines()) <= 45
    assert list((ROOT / "tests" / room).glob("test_*.py"))


OVER_DIALECT = {"sessions": "pipelines"}
"""A layer over one dialect -> the dialect, which it may import."""


def test_every_dialect_has_a_folder() -> None:
    assert all((ROOT / "app" / "api" / name / "__init__.py").exists() for name in DIALECTS)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "app" / "api").rglob("*.py")), ids=lambda path: "/".join(parts_of(path))
)
def test_no_dialect_is_imported_by_another_or_by_shared_modules(path: Path) -> None:
    """``app/routes.py`` combines the dialects. ``app/process`` may import one dialect, because it prints a sample."""
    _api, own, *_rest = parts_of(path)
    own = OVER_DIALECT.get(own, own)
    others = {*DIALECTS} - {own}
    for name in imports_of(path):
        assert not any(f"{name}.".startswith(f"app.api.{other}.") for other in others), f"{own} imports {name}"


def test_every_package_has_a_layer() -> None:
    packages = {path.name for path in (ROOT / "app").iterdir() if (path / "__init__.py").exists()}
    assert packages <= LAYERS.keys()


def test_a_story_is_one_file() -> None:
    """A module with fewer than 60 lines and one importer belongs to that importer."""
    importers: dict[Path, set[Path]] = {path: set() for path in MODULES if STARTER not in path.parents}
    for path in importers:
        for name in imports_of(path):
            imported = ROOT / f"{name.replace('.', '/')}.py"
            if imported in importers:
                importers[imported].add(path)
    alone = {path for path, users in importers.items() if len(users) == 1 and path.stem != "__init__"}
    assert not [parts_of(path) for path in alone if len(path.read_text().splitlines()) < 60]


def test_a_basename_stands_once() -> None:
    names = Counter(path.stem for path in MODULES if STARTER not in path.parents)
    assert {name for name, count in names.items() if count > 1} == {"__init__"}


def test_no_package_is_larger_than_its_ceiling() -> None:
    lines = Counter[str]()
    for path in MODULES:
        package, *rest = parts_of(path)
        lines[package if rest else ""] += len(path.read_text().splitlines())
    assert not {
        name: count for name, count in lines.items() if count > MOST_LINES.get(name, MOST_LINES_OUTSIDE_PACKAGES)
    }


def test_a_public_class_name_stands_once() -> None:
    names = Counter(
        node.name
        for path in MODULES
        if STARTER not in path.parents
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in names.items() if count > 1]


def test_every_folder_says_what_lives_in_it() -> None:
    for path in MODULES:
        if path.name == "__init__.py" and path.parent.parent.name in {"app", "triton"}:
            assert "\n\n" in (ast.get_docstring(ast.parse(path.read_text())) or ""), path.parent.name


LAYERS_OF_REQUESTS = {
    "api/explain": (
        r"x-explain|may_explain|explanations|explain: bool|\bapi\.explain\b",
        {"admission/keys", "process/gateway", "settings"},
    ),
    "coalescing": (r"coalesc", {"lint/findings", "pipelines/spec", "process/gateway"}),
    "sessions": (
        r"(?<!start_new_)session(?<!\}/session)|\}/sessions",
        {"admission/keys", "pipelines/spec", "process/gateway"},
    ),
    "idempotency": (r"idempotency", {"process/gateway"}),
}
"""Folder -> the names of its feature, and the modules outside of it that have them: its settings, and its wiring.

``app/sessions`` and ``app/api/sessions`` are one feature. Every pipeline has a WebSocket at ``/session``.
"""
OTHER_SESSIONS = {"grpc"}
"""Has sessions of HTTP/2."""


@pytest.mark.parametrize("folder", LAYERS_OF_REQUESTS)
def test_a_feature_is_named_outside_its_folder_only_where_it_is_set_and_wired(folder: str) -> None:
    words, expected = LAYERS_OF_REQUESTS[folder]
    named = {
        "/".join(parts_of(path))
        for path in MODULES
        if parts_of(path)[0] not in OTHER_SESSIONS
        and folder not in "/".join(parts_of(path))
        and re.search(words, path.read_text(), re.IGNORECASE)
    }
    assert named == expected


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    named = {re.match(r"[A-Za-z0-9-]+", each)[0] for each in listed}  # type: ignore[index]
    explained = set(
        re.findall(r"^\| `([a-z0-9-]+)` \| \S", (ROOT / "docs" / "explanation" / "dependencies.md").read_text(), re.M)
    )
    assert named == explained
