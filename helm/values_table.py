"""Writes the table of values in the chart's README from the comments of its values.yaml.

A value's description is the comment right above its key. A key that is described, or that holds something that is no
mapping, is a row; the keys below a described mapping are rows of their own.

    .venv/bin/python helm/values_table.py
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

CHART = Path(__file__).parent / "triton-gateway"
BEGIN, END = "<!-- values: written by helm/values_table.py -->", "<!-- end of values -->"


@dataclass(frozen=True)
class Row:
    key: str
    default: str
    description: str


def rows_of(text: str) -> list[Row]:
    """A row for every value in the text of a values.yaml, in its order."""
    return list(_rows(yaml.compose(text), "", text.splitlines()))


def table_of(rows: list[Row]) -> str:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    lines += [f"| `{row.key}` | {row.default} | {row.description.replace('|', '&#124;')} |" for row in rows]
    return "\n".join(lines)


def with_table(readme: str, table: str) -> str:
    """Returns the README with a new text between its two marks. Raises ValueError if a mark is missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md needs the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _rows(node: yaml.Node, prefix: str, lines: list[str]) -> Iterator[Row]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        description = _comment_above(lines, key.start_mark.line)
        is_section = isinstance(value, yaml.MappingNode) and bool(value.value) and not _is_one_value(name)
        if is_section:
            yield from _rows(value, f"{name}.", lines)
        else:
            yield Row(name, _shown(value), description)


def _is_one_value(name: str) -> bool:
    """Mappings in the words of Kubernetes, which are replaced or merged as they are."""
    return name.rpartition(".")[2] in {"resources", "securityContext", "podSecurityContext", "labels"}


def _comment_above(lines: list[str], line: int) -> str:
    comment: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("# "):
        line -= 1
        comment.insert(0, lines[line].lstrip().removeprefix("# "))
    return " ".join(comment)


def _shown(node: yaml.Node) -> str:
    text = json.dumps(yaml.safe_load(yaml.serialize(node)))
    return f"`{text}`"


def main() -> None:
    readme = CHART / "README.md"
    table = table_of(rows_of((CHART / "values.yaml").read_text()))
    readme.write_text(with_table(readme.read_text(), table))


if __name__ == "__main__":
    main()
