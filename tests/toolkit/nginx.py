"""A real nginx: its defaults, and the server block that the documentation shows."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import Require
from tests.docs.pages import ROOT, blocks_of
from tests.toolkit.certificates import Authority
from tests.toolkit.programs import listens, running_program

PAGE = ROOT / "docs" / "how-to" / "proxies.md"
USER = "" if os.getuid() else "user root root;"
"""The user who may read the test's folder; by default nginx's workers change to another one."""
CONFIG = """
daemon off;
{user}
worker_processes 1;
pid "{folder}/pid";
error_log "{folder}/error.log";
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path "{folder}/body";
  proxy_temp_path "{folder}/proxy";
  fastcgi_temp_path "{folder}/fastcgi";
  uwsgi_temp_path "{folder}/uwsgi";
  scgi_temp_path "{folder}/scgi";
{servers}
}}
"""
GZIP = """
gzip on;
gzip_proxied any;
gzip_min_length 1;
gzip_types {types};
"""


def plain_server(port: int, upstream: str, more: str = "") -> str:
    """A server with nginx's defaults."""
    return f"server {{ listen 127.0.0.1:{port}; {more} location / {{ proxy_pass {upstream}; }} }}"


def documented_server(port: int, upstream: str, authority: Authority) -> str:
    """The configuration of ``proxies.md``, with this port, upstream and a certificate for 127.0.0.1."""
    text, _ = nginx_blocks()
    issued = authority.files("127.0.0.1")
    replacements = {
        "listen 443": f"listen 127.0.0.1:{port}",
        "/etc/nginx/gateway.crt": f'"{issued.certificate}"',
        "/etc/nginx/gateway.key": f'"{issued.key}"',
        "http://127.0.0.1:8080": upstream,
    }
    for shown, own in replacements.items():
        assert shown in text
        text = text.replace(shown, own)
    return text


def documented_affinity(port: int, first: str, second: str) -> str:
    """The upstream of ``proxies.md`` that keeps each client at one of two gateways (``host:port``)."""
    _, text = nginx_blocks()
    for shown, own in (("10.0.0.11:8080", first), ("10.0.0.12:8080", second)):
        assert text.count(shown) == 1
        text = text.replace(shown, own)
    return text + plain_server(port, "http://gateways", "proxy_set_header Host $host;")


def nginx_blocks() -> list[str]:
    return [text for language, text in blocks_of(PAGE) if language == "nginx"]


@contextmanager
def running_nginx(folder: Path, require: Require, port: int, servers: str) -> Iterator[None]:
    """``port``: one of those that ``servers`` listen on."""
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin")
    require(nginx, "nginx is not installed: `make system-packages` installs it")
    (folder / "nginx.conf").write_text(CONFIG.format(user=USER, folder=folder, servers=servers))
    command = [str(nginx), "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    with running_program(command, folder / "nginx.log", lambda: listens(port)):
        yield
