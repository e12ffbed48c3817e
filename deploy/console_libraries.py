"""Copy the console's JavaScript libraries from npm to app/console/static/vendor, with their licences.

    make vendor

``requirements/console/package-lock.json`` has the versions and the hashes, which npm checks. The copies need
no build step: a bare module name becomes a relative one, and uPlot's minified build, a plain script, becomes a module.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from deploy.bootstrap import CACHE, ROOT

LOCK = ROOT / "requirements" / "console"
VENDOR = ROOT / "app" / "console" / "static" / "vendor"
FILES = {
    "preact.js": ("preact", "dist/preact.mjs"),
    "hooks.js": ("preact", "hooks/dist/hooks.mjs"),
    "htm.js": ("htm", "dist/htm.mjs"),
    "dagre.js": ("@dagrejs/dagre", "dist/dagre.esm.js"),
    "uplot.js": ("uplot", "dist/uPlot.iife.min.js"),
    "uplot.css": ("uplot", "dist/uPlot.min.css"),
}
"""Source of each copy: package, and path in the package. dagre's build also contains @dagrejs/graphlib."""
PURPOSES = {
    "preact": "components and hooks",
    "htm": "templates for Preact without a build step",
    "@dagrejs/dagre": "layout of the graph; contains @dagrejs/graphlib, with the same licence",
    "uplot": "charts",
}


def main() -> None:
    """Copy the libraries to the folder that the command line names, or to the console."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else VENDOR
    copy(installed(), target)


def installed() -> Path:
    """Installs the locked packages in .cache. Returns the folder node_modules."""
    folder = CACHE / "console-libraries"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(LOCK / name, folder)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--loglevel=error"]
    subprocess.run(command, cwd=folder, env=os.environ | {"npm_config_cache": str(CACHE / "npm")}, check=True)
    return folder / "node_modules"


def copy(modules: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name, (package, path) in FILES.items():
        (target / name).write_text(as_module(name, (modules / package / path).read_text()))
    for package in PURPOSES:
        shutil.copy(modules / package / "LICENSE", target / f"{short(package)}.LICENSE")
    (target / "README.md").write_text(readme(target))


def as_module(name: str, text: str) -> str:
    text = re.sub(r"\n//# sourceMappingURL=.*", "", text).replace('from"preact"', 'from"./preact.js"')
    return text.rstrip("\n") + ("\nexport default uPlot;\n" if name == "uplot.js" else "\n")


def readme(target: Path) -> str:
    """The table of the copies, with the version, the licence and the SHA-256 of each."""
    packages = json.loads((LOCK / "package-lock.json").read_text())["packages"]
    lines = [
        "# Libraries of the console",
        "",
        "`make vendor` writes this folder from `requirements/console/package-lock.json`. Do not edit the files.",
        "",
        "| file | package | version | licence | purpose | SHA-256 |",
        "|---|---|---|---|---|---|",
    ]
    for name, (package, _) in FILES.items():
        locked = packages[f"node_modules/{package}"]
        licence = f"[{locked['license']}]({short(package)}.LICENSE)"
        digest = sha256((target / name).read_bytes()).hexdigest()
        row = [f"`{name}`", f"`{package}`", locked["version"], licence, PURPOSES[package], f"`{digest}`"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, ""])


def short(package: str) -> str:
    return package.rpartition("/")[2]


if __name__ == "__main__":
    main()
