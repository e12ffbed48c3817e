"""``make release``: the tag decides the version of every file, and links work outside of the repository."""

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

from deploy import release
from deploy.bootstrap import ROOT

URL = "https://git.example.com/team/triton-gateway"


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with two tags: a release, and one that the changelog does not have."""
    clone = tmp_path_factory.mktemp("tagged") / "clone"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", clone], check=True)
    changes = clone / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("## [Unreleased]", "## [9.8.7] - 2030-01-01"))
    author = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    for command in (("commit", "--quiet", "-am", "A release"), ("tag", "v9.8.7"), ("tag", "v9.9.9")):
        subprocess.run(["git", *author, *command], cwd=clone, check=True)
    return clone


@pytest.mark.full
def test_the_files_of_a_release_have_the_version_of_the_tag(tagged: Path, tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    release.make("v9.8.7", URL, tagged, dist)
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "wheel")
        names = wheel.namelist()
    command = [sys.executable, "-m", "app.cli", "--version"]
    said = subprocess.run(command, cwd=tmp_path / "wheel", check=True, capture_output=True, text=True).stdout
    assert said.strip() == "9.8.7"
    folder = "triton_gateway-9.8.7.dist-info"
    assert {f"{folder}/licenses/{name}" for name in ("LICENSE", "NOTICE")} < {*names}
    assert "app/py.typed" in names
    metadata = message_from_string((tmp_path / "wheel" / folder / "METADATA").read_text())
    assert f"Repository, {URL}" in metadata.get_all("Project-URL", [])
    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert f"{URL}/raw/v9.8.7/docs/images/console.png" in links
    assert all(link.startswith(("https://", "#")) for link in links)
    with tarfile.open(dist / "triton-gateway-9.8.7.tgz") as chart:
        described = yaml.safe_load(chart.extractfile("triton-gateway/Chart.yaml").read())
    assert (described["version"], described["appVersion"]) == ("9.8.7", "9.8.7")
    with tarfile.open(dist / "triton-gateway-site-9.8.7.tar.gz") as site:
        assert {f"app/site/{name[2:]}" for name in site.getnames() if name.endswith(".html")} < {*names}
    bom = json.loads((dist / "triton-gateway-9.8.7.cdx.json").read_text())
    locked = re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements" / "gateway.txt").read_text(), re.M)
    assert {(each["name"], each["version"]) for each in bom["components"]} == {*locked}
    sums = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines())
    files = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in dist.iterdir()}
    assert sums == {name: found for name, found in files.items() if name != "SHA256SUMS"}


@pytest.mark.parametrize(
    ("tag", "said"), [("v9.8.8", "There is no tag v9.8.8"), ("v9.9.9", "CHANGELOG.md of v9.9.9 has no section [9.9.9]")]
)
def test_a_tag_that_cannot_be_released_is_refused(tagged: Path, tmp_path: Path, tag: str, said: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(said)):
        release.make(tag, URL, tagged, tmp_path / "dist")


@pytest.mark.parametrize("arguments", [[], ["v1.2.3"], ["1.2.3", URL], ["v1.2.3rc1", URL], ["v1.2.3", "example"]])
def test_a_release_needs_a_tag_and_an_address(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["release", *arguments])
    with pytest.raises(SystemExit, match="Name the tag and the address"):
        release.main()
