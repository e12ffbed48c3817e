"""Broken gateway.yaml files with steps: check and a gateway refuse them with words, and agree with each other."""

import copy
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from app.config.document import ConfigError
from app.lint.findings import check_of
from app.lint.linter import check
from app.pipelines.catalog import Catalog, VersionState
from app.pipelines.file import read_gateway_file
from app.triton.repository import read_repository
from tests.toolkit.engine import FakeEngine
from tests.toolkit.processes import LIVE

VALID = yaml.safe_load("""
shop:
  inputs: {first: {tensor: FIRST, kind: text}, rows: {tensor: ROWS}}
  parameters: {mode: {type: string, default: x}, n: {type: integer, default: 3}, flag: {type: boolean, optional: true}}
  steps:
    a: {model: scripted, inputs: {SCRIPT: FIRST}}
    rows: {model: batched_echo, each: ROWS, inputs: {X: ROWS}, in_flight: 2}
    stop: {when: {any_of: [{empty: a.NUMBERS}, {all_of: [{in: [n, [1, 2]]}, {equals: [flag, true]}]}]}, exit: none}
    b: {model: scripted_chain, inputs: {SCRIPT: a.TEXT}, when: {any: {below: [a.NUMBERS, 0.5]}}, optional: true}
    c: {model: scripted, inputs: {SCRIPT: a.TEXT}, when: {not: {equals: [mode, x]}}, after: [rows], timeout_s: 2}
    d: {model: scripted_stream, inputs: {SCRIPT: {race: [b.TEXT, c.TEXT]}}}
    e: {model: scripted_nested, version: "1", inputs: {SCRIPT: {value: "{}"}}}
  outputs:
    text: {first: [b.TEXT, c.TEXT], kind: text}
    y: {tensor: rows.Y}
    d: {tensor: d.TEXT, kind: text}
    e: {tensor: e.TEXT, kind: text}
  contract: {a.NUMBERS: {max_items: 4}}
  early_exit: [{reason: nothing, missing: [b.TEXT]}]
  stream: true
""")
WORDS = [
    "",
    ".",
    "a.",
    "a.TEXT",
    "a.NUMBERS",
    "d.TEXT",
    "rows.Y",
    "=a",
    "FIRST",
    "ROWS",
    "mode",
    "a",
    "no",
    "é",
    "\x00",
]
ODD = [*WORDS, None, -1, 0.5, 2**70, float("nan"), True, [], {}, [None], {"first": ["a.TEXT", "b.TEXT"]}, {"value": {}}]
KEYS = [
    "model",
    "each",
    "when",
    "exit",
    "after",
    "not",
    "any",
    "in",
    "race",
    "batch",
    "session",
    "join",
    "cancel",
    "skipped",
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*path, key)
        yield from places(each, (*path, key))


def mutated(random: Random) -> dict[str, Any]:
    document: dict[str, Any] = copy.deepcopy(VALID)
    for _ in range(random.choice([1, 1, 2, 4])):
        found = [path for path in places(document) if len(path) > 1]
        if not found:
            break
        *above, key = random.choice(found)
        parent, other = document, document
        for each in above:
            parent = parent[each]
        for each in random.choice(found):
            other = other[each]
        if (change := random.randrange(5)) == 0:
            del parent[key]
        elif change == 1 and isinstance(parent, dict):
            parent[random.choice(KEYS)] = parent.pop(key)
        elif change == 2 and isinstance(parent, dict):
            parent[random.choice(KEYS)] = copy.deepcopy(random.choice(ODD))
        else:
            parent[key] = copy.deepcopy(random.choice([other, *random.choices(ODD, k=3)]))
    return document


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 3000), marks=pytest.mark.full)], ids=str)
async def test_a_mutated_file_is_refused_or_can_be_served(tmp_path: Path, seeds: range) -> None:
    """A file without errors in check is served: its steps fit the models."""
    repository, path = read_repository(LIVE / "models"), tmp_path / "gateway.yaml"
    configs, outcomes = [each.config for each in repository], set[str]()
    for seed in seeds:
        random = Random(seed)
        document = {"pipelines": mutated(random), "oip": {"models": random.choice(["all", ["shop"], []])}}
        path.write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
        try:
            file = read_gateway_file(path)
        except ConfigError:
            outcomes.add("refused")
            continue
        has_errors = any(check_of(each).severity == "error" for each in check(repository, file))
        catalog = Catalog(FakeEngine.of(*configs), path)
        catalog.load_file()
        await catalog.refresh()
        states = {entry.state for entry in catalog.entries.values()}
        outcomes |= {"error" if has_errors else "served"}
        assert has_errors or states <= {VersionState.READY, VersionState.WARMING}, (seed, states)
        assert not any("cannot be compiled" in entry.problem for entry in catalog.entries.values()), seed
    assert outcomes == {"refused", "error", "served"}


def test_a_step_with_an_empty_name_of_a_model_is_an_error(tmp_path: Path) -> None:
    document: dict[str, Any] = {"pipelines": copy.deepcopy(VALID)}
    document["pipelines"]["shop"]["steps"]["e"]["model"] = ""
    (path := tmp_path / "gateway.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    (finding,) = check(read_repository(LIVE / "models"), read_gateway_file(path))
    assert "steps.e.model '' is not a model in the repository" in finding.text
    assert check_of(finding).severity == "error"
