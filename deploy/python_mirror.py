"""Packs a Python of this machine as a download for uv, for machines that cannot reach uv's own address.

    python3 deploy/python_mirror.py /usr/bin/python3.11 my_mirror
    UV_PYTHON_DOWNLOADS_JSON_URL=file://$PWD/my_mirror/downloads.json make run

Standard library only. The archive has the layout of uv's own downloads. The Python is 3.10 to 3.12 with a shared
libpython; it runs on systems that have the libraries of the system it is from. docs/decisions/0015-embedded-triton.md
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

_FACTS = """
import json, os, platform, sys, sysconfig
name, libdir = sysconfig.get_config_var("INSTSONAME"), sysconfig.get_config_var("LIBDIR")
libraries = [os.path.join(libdir, *rest, name) for rest in ((), (sysconfig.get_config_var("MULTIARCH") or "",))]
libraries.append(os.path.join(sys.base_prefix, "lib", name))  # a Python that was moved after its installation
library = next((path for path in libraries if os.path.isfile(path)), None)
print(json.dumps({"version": sys.version_info[:3], "machine": platform.machine(), "library": library,
                  "stdlib": sysconfig.get_path("stdlib"), "program": os.path.realpath(sys._base_executable)}))
"""
_LEFT_OUT = ("/test/", "/__pycache__/", "/idlelib/", "/site-packages/", "/dist-packages/")


def write_mirror(python: Path, folder: Path, address: str | None = None) -> Path:
    """Writes the archive and `downloads.json`, uv's list of downloads, in `folder`. Returns the list.

    Args:
        python: 3.10 to 3.12 with a shared libpython.
        folder: a new or existing folder.
        address: of `folder` for uv; the default is its `file://` address.
    """
    facts = json.loads(subprocess.run([python, "-I", "-c", _FACTS], stdout=subprocess.PIPE, check=True).stdout)
    if facts["library"] is None:
        raise SystemExit(f"{python} has no shared libpython.")
    version = ".".join(map(str, facts["version"]))
    archive = folder / f"cpython-{version}-{facts['machine']}-unknown-linux-gnu-install_only.tar.gz"
    folder.mkdir(parents=True, exist_ok=True)
    _pack(facts, archive)
    downloads = folder / "downloads.json"
    downloads.write_text(json.dumps(_list_of(facts, archive, address or folder.resolve().as_uri()), indent=1))
    return downloads


def _pack(facts: dict, archive: Path) -> None:
    name = "python{}.{}".format(*facts["version"])
    with tarfile.open(archive, "w:gz", compresslevel=1) as packed:
        packed.add(facts["program"], f"python/bin/{name}")
        for link in ("python3", "python"):
            entry = tarfile.TarInfo(f"python/bin/{link}")
            entry.type, entry.linkname = tarfile.SYMTYPE, name
            packed.addfile(entry)
        packed.add(os.path.realpath(facts["library"]), f"python/lib/{Path(facts['library']).name}")
        packed.add(facts["stdlib"], f"python/lib/{name}", filter=_needed)


def _needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leaves out what no model needs, and links to the system's configuration, which uv does not unpack."""
    is_outside = entry.issym() and entry.linkname.startswith("/")
    return None if is_outside or any(part in f"/{entry.name}/" for part in _LEFT_OUT) else entry


def _list_of(facts: dict, archive: Path, address: str) -> dict:
    major, minor, patch = facts["version"]
    return {
        f"cpython-{major}.{minor}.{patch}-linux-{facts['machine']}-gnu": {
            "name": "cpython",
            "arch": {"family": facts["machine"], "variant": None},
            "os": "linux",
            "libc": "gnu",
            "major": major,
            "minor": minor,
            "patch": patch,
            "prerelease": "",
            "url": f"{address}/{archive.name}",
            "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
            "variant": None,
        }
    }


if __name__ == "__main__":
    sys.stdout.write(f"{write_mirror(Path(sys.argv[1]), Path(sys.argv[2]))}\n")
