"""Build the files of a release from a tag: wheel, source archive, chart, documentation site, SBOM and checksums.

    make release TAG=v0.2.0 URL=https://github.com/OWNER/triton-gateway

The tag decides the version. The files are built from a copy of the tag's commit in ``.cache/release``, in which this
program sets the version and the addresses of the project. The images are built from the same folder, as RELEASING.md
says. Nothing is published.
"""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from deploy.bootstrap import CACHE, ROOT
from deploy.documentation import LINK, build
from deploy.tool_environment import tool_environment

TAG = re.compile(r"v\d+\.\d+\.\d+")
SOURCE = CACHE / "release"


def main() -> None:
    """Build the release that the command line names, in dist/."""
    match sys.argv[1:]:
        case [tag, url] if TAG.fullmatch(tag) and urlsplit(url).netloc:
            make(tag, url.rstrip("/"), ROOT, ROOT / "dist")
        case _:
            sys.exit(
                "Name the tag and the address of the repository: make release TAG=v0.2.0 URL=https://HOST/OWNER/NAME"
            )


def make(tag: str, url: str, root: Path, target: Path) -> None:
    """Build every file of the release. Exits with the reason if the tag or the changelog does not fit.

    Args:
        tag: An existing tag, ``v`` and the version.
        url: The address of the repository, which the README's links and the metadata name.
        root: The git checkout that has the tag.
        target: The folder of the files. What it contains is removed.
    """
    version = tag.removeprefix("v")
    command = ("git", "rev-parse", "--verify", "--quiet", f"{tag}^{{commit}}")
    commit = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip()
    if not commit:
        sys.exit(f"There is no tag {tag}: git tag -s {tag}")
    shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", tag], cwd=root, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=SOURCE, input=archive, check=True)
    if f"\n## [{version}]" not in (SOURCE / "CHANGELOG.md").read_text():
        sys.exit(f"CHANGELOG.md of {tag} has no section [{version}]")
    build(SOURCE / "app" / "site", SOURCE)
    set_version(SOURCE, version)
    set_addresses(SOURCE, url, tag)
    run(sys.executable, "-m", "hatchling", "build", "--directory", target)
    charts = ("helm", "package", "helm/triton-gateway", "--version", version, "--app-version", version)
    run(Path(sys.executable).with_name(charts[0]), *charts[1:], "--destination", target)
    shutil.make_archive(str(target / f"triton-gateway-site-{version}"), "gztar", SOURCE / "app" / "site")
    bom = target / f"triton-gateway-{version}.cdx.json"
    described = ("--pyproject", SOURCE / "pyproject.toml", "--output-reproducible", "--output-file", bom)
    run(tool_environment("sbom") / "cyclonedx-py", "requirements", SOURCE / "requirements/gateway.txt", *described)
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(target.iterdir())]
    (target / "SHA256SUMS").write_text("".join(sums))
    sys.stdout.write(f"{target} has {tag}, commit {commit}. RELEASING.md has the next steps.\n")


def set_version(folder: Path, version: str) -> None:
    module = folder / "app" / "__init__.py"
    module.write_text(re.sub(r'(?<=__version__ = ")[^"]+', version, module.read_text()))


def set_addresses(folder: Path, url: str, tag: str) -> None:
    """Name the repository in the package's metadata, and in the README, whose links a package index cannot follow."""
    readme, project = folder / "README.md", folder / "pyproject.toml"

    def absolute(link: re.Match[str]) -> str:
        target = link[1] or link[2]
        kind = "raw" if target.endswith((".png", ".svg")) else "blob"
        return (
            link[0] if "://" in target or target[0] == "#" else link[0].replace(target, f"{url}/{kind}/{tag}/{target}")
        )

    readme.write_text(LINK.sub(absolute, readme.read_text()).replace("<this repository>", url))
    addresses = {"Repository": url, "Changelog": f"{url}/blob/{tag}/CHANGELOG.md", "Issues": f"{url}/issues"}
    lines = "".join(f'{name} = "{address}"\n' for name, address in addresses.items())
    project.write_text(project.read_text().replace("[project.scripts]", f"[project.urls]\n{lines}\n[project.scripts]"))


def run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], cwd=SOURCE, check=True)


if __name__ == "__main__":
    main()
