"""values.yaml is the reference of the chart's values: each has its description in the comment above it."""

from collections.abc import Iterator

import yaml

from tests.helm.rendering import CHART

MAPPINGS_OF_KUBERNETES = {"resources", "securityContext", "podSecurityContext", "labels"}
"""Each is one value, described as a whole."""


def test_every_value_is_described() -> None:
    text = (CHART / "values.yaml").read_text()
    described = dict(comments(yaml.compose(text), "", text.splitlines()))
    assert [key for key, comment in described.items() if not comment.startswith("# ")] == []
    assert len(described) > len(yaml.safe_load(text))


def comments(node: yaml.Node, prefix: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the key of each value, and the line above it."""
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        has_keys = isinstance(value, yaml.MappingNode) and bool(value.value)
        if has_keys and key.value not in MAPPINGS_OF_KUBERNETES:
            yield from comments(value, f"{name}.", lines)
        else:
            yield name, lines[key.start_mark.line - 1].lstrip()
