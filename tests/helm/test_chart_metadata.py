"""The metadata in Chart.yaml for Helm and Artifact Hub."""

import base64
import tomllib

import yaml

from tests.helm.rendering import CHART, ROOT

METADATA = yaml.safe_load((CHART / "Chart.yaml").read_text())
CATEGORIES = {
    "ai-machine-learning",
    "database",
    "integration-delivery",
    "monitoring-logging",
    "networking",
    "security",
    "storage",
    "streaming-messaging",
}
"""Source: Artifact Hub's documentation, "Helm annotations"."""
LISTS = {"artifacthub.io/links", "artifacthub.io/recommendations"}


def test_the_icon_is_the_icon_of_the_console() -> None:
    kind, _, content = METADATA["icon"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(content) == (ROOT / "app" / "console" / "static" / "icon.svg").read_bytes()


def test_annotations_are_known_to_artifact_hub() -> None:
    annotations = METADATA["annotations"]
    assert annotations["artifacthub.io/category"] in CATEGORIES
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert annotations["artifacthub.io/license"] == project["license"]
    for name in LISTS:
        assert all(each["url"].startswith("https://") for each in yaml.safe_load(annotations[name]))


def test_addresses_are_not_placeholders() -> None:
    """The chart has no addresses of a publisher; the README lists where to add them."""
    assert "example." not in (CHART / "Chart.yaml").read_text()
    section = (CHART / "README.md").read_text().partition("## Publish the chart")[2].partition("\n## ")[0]
    for field in ("home", "sources", "maintainers", "artifacthub.io/images"):
        assert f"`{field}" in section
    assert "home" not in METADATA
