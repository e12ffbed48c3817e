"""Downloads of images from real servers on loopback, which only these tests allow."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from app.api.downloads import MAX_DOWNLOADS, ImageDownloads, is_public, resolve
from tests.toolkit.certificates import Authority
from tests.toolkit.http_server import GIF, PNG, ImageHost, answer, image_host

HOST = "images.example.com"
ANSWERS = {
    "/a.png": answer(),
    "/a.gif": answer(GIF, content_type="binary/octet-stream"),
    "/untyped": answer(content_type=""),
    "/page": answer(b"<html>", content_type="text/html"),
    "/text": answer(b"no image at all"),
    "/packed": answer(content_encoding="gzip"),
    "/absent": answer(b"", "404 Not Found"),
    "/once": answer(b"", "302 Found", location="/a.png"),
    "/loop": answer(b"", "307 Temporary Redirect", location="/loop"),
    "/private": answer(b"", "302 Found", location="http://169.254.169.254/latest/meta-data"),
    "/other": answer(b"", "301 Moved Permanently", location="https://other.example.com/a.png"),
    "/nowhere": answer(b"", "302 Found", location="http://[::x/"),
    "/garbage": b"\0" * 100,
}


@pytest.fixture
async def host() -> AsyncIterator[ImageHost]:
    async with image_host(ANSWERS) as server:
        yield server


def downloads_of(host: ImageHost, **more: Any) -> ImageDownloads:
    """Allows loopback."""
    given = {
        "resolve": AsyncMock(return_value=["127.0.0.1"]),
        "may_connect": lambda _ip: True,
        "timeout_s": 2.0,
        **more,
    }
    return ImageDownloads([f"http://{HOST}:{host.port}"], **given)


async def download(host: ImageHost, path: str, count: Callable[[int], None] = lambda _size: None, **more: Any) -> bytes:
    return await downloads_of(host, **more).download(f"http://{HOST}:{host.port}{path}", count)


@pytest.mark.parametrize(("path", "content"), [("/a.png", PNG), ("/a.gif", GIF), ("/untyped", PNG), ("/once", PNG)])
async def test_an_image_is_downloaded(host: ImageHost, path: str, content: bytes) -> None:
    sizes: list[int] = []
    assert await download(host, path, sizes.append) == content
    assert sum(sizes) == len(content)
    head = host.requests[0].lower()  # the server sees its own name, and nothing of the caller
    assert f"host: {HOST}:{host.port}\r\n" in head
    assert "cookie" not in head
    assert "authorization" not in head


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/page", "media type is not image"),
        ("/text", "not an image of a known format"),
        ("/packed", "compressed"),
        ("/absent", "answers 404"),
        ("/loop", "redirected more than 3 times"),
        ("/private", "redirected to an address that may not be downloaded"),
        ("/other", "redirected to an address that may not be downloaded"),
        ("/nowhere", "does not answer properly"),
        ("/garbage", "does not answer properly"),
        *((path, "was not downloaded within 0.3 s") for path in ("/slow", "/endless")),
    ],
)
async def test_another_answer_is_refused(host: ImageHost, path: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        await download(host, path, timeout_s=0.3 if path in {"/slow", "/endless"} else 2.0)


async def test_an_endless_body_ends_at_the_bound(host: ImageHost) -> None:
    size = 0

    def count(piece: int) -> None:
        nonlocal size
        size += piece
        if size > 200_000:
            raise ValueError("is too large")

    with pytest.raises(ValueError, match="is too large"):
        await download(host, "/endless", count)
    assert size < 400_000


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1", "fe80::1%1", "64:ff9b::7f00:1", "0.0.0.0"],
)
async def test_a_name_of_a_private_address_is_refused(host: ImageHost, address: str) -> None:
    names = AsyncMock(return_value=["93.184.216.34", address])
    with pytest.raises(ValueError, match="no public IP address"):
        await download(host, "/a.png", resolve=names, may_connect=is_public)
    assert host.requests == []


async def test_each_address_is_resolved_once_and_checked(host: ImageHost) -> None:
    """With DNS rebinding the second answer for a name would be another address."""
    names = AsyncMock(side_effect=[["127.0.0.1"], ["127.0.0.2"]])
    assert await download(host, "/a.png", resolve=names, may_connect=lambda ip: ip == "127.0.0.1") == PNG
    names.assert_awaited_once_with(HOST, host.port)
    names = AsyncMock(side_effect=[["127.0.0.1"], ["127.0.0.2"]])
    with pytest.raises(ValueError, match="no public IP address"):
        await download(host, "/once", resolve=names, may_connect=lambda ip: ip == "127.0.0.1")
    assert len(host.requests) == 2


async def test_the_next_address_is_tried_if_one_does_not_answer(host: ImageHost) -> None:
    assert await download(host, "/a.png", resolve=AsyncMock(return_value=["127.0.0.9", "127.0.0.1"])) == PNG


async def test_an_unknown_name_is_refused(host: ImageHost) -> None:
    unknown = AsyncMock(side_effect=OSError("Name or service not known"))
    with pytest.raises(ValueError, match="host is not known"):
        await download(host, "/a.png", resolve=unknown)


async def test_names_are_resolved_by_the_system() -> None:
    assert set(await resolve("localhost", 80)) <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("http://images.example.com/a.png", "host from which"),
        ("https://images.example.com:8443/a.png", "host from which"),
        ("https://images.example.com./a.png", "host from which"),
        ("https://images.example.com.evil.example/a.png", "host from which"),
        ("https://evil.example/@images.example.com", "host from which"),
        ("https://images.example.com@evil.example/a.png", "user name"),
        ("https://user:password@images.example.com/a.png", "user name"),
        ("https://[::x]/", "not an address"),
        ("file:///etc/passwd", "host from which"),
        ("https://images.example.com/" + "a" * 2048, "more than 2048"),
    ],
)
def test_only_listed_hosts_are_asked(address: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ImageDownloads(["https://images.example.com"]).check(address)


def test_a_host_is_compared_in_its_usual_form() -> None:
    downloads = ImageDownloads(["https://images.example.com", "https://xn--bcher-kva.example"])
    assert downloads.check("https://Images.EXAMPLE.com:443/a?b#c").host == "images.example.com"
    downloads.check("HTTPS://images.example.com/a.png")
    downloads.check("https://bücher.example/a.png")


PUBLIC = [
    *("8.8.8.8", "93.184.216.34", "2606:2800:220:1::1", "2620:4f:8000::1", "64:ff9b::5db8:d822"),
    "::ffff:93.184.216.34",
]
NOT_PUBLIC = [
    *("100.64.0.1", "192.168.1.1", "172.16.0.1", "224.0.0.1", "255.255.255.255", "192.0.0.8", "192.88.99.1"),
    *("192.175.48.1", "168.63.129.16", "fc00::1", "fec0::1", "ff02::1", "::", "2002:7f00:1::", "64:ff9b:1::7f00:1"),
    *("2001::1", "::127.0.0.1", "::8.8.8.8", "::ffff:0:127.0.0.1", "::ffff:192.88.99.1", "5f00::1", "3fff::1"),
    *("100:0:0:1::1", "64:ff9b:2::1", "4000::1", "fe00::1"),
]


@pytest.mark.parametrize(("address", "expected"), [*zip(PUBLIC, repeat(True)), *zip(NOT_PUBLIC, repeat(False))])
def test_only_public_addresses_count_as_public(address: str, *, expected: bool) -> None:
    assert is_public(address) is expected


class TestTls:
    @pytest.fixture
    def authority(self, tmp_path: Path) -> Authority:
        return Authority(tmp_path)

    async def _download(self, authority: Authority, name: str) -> tuple[bytes, list[str | None]]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue(name).configure_cert(context)
        async with image_host(ANSWERS, context) as host:
            downloads = ImageDownloads(
                [f"https://{HOST}:{host.port}"],
                resolve=AsyncMock(return_value=["127.0.0.1"]),
                may_connect=lambda _ip: True,
                tls=ssl.create_default_context(cafile=str(authority.path)),
            )
            return await downloads.download(f"https://{HOST}:{host.port}/a.png", lambda _size: None), host.names

    async def test_the_certificate_is_of_the_host_and_not_of_its_address(self, authority: Authority) -> None:
        assert await self._download(authority, HOST) == (PNG, [HOST])

    async def test_a_certificate_of_another_host_is_refused(self, authority: Authority) -> None:
        with pytest.raises(ValueError, match="does not answer properly"):
            await self._download(authority, "127.0.0.1")


async def test_downloads_are_limited(host: ImageHost) -> None:
    downloads = downloads_of(host, timeout_s=1.0)
    addresses = [f"http://{HOST}:{host.port}/slow"] * (MAX_DOWNLOADS + 4)
    tasks = [asyncio.create_task(downloads.download(each, lambda _size: None)) for each in addresses]
    await asyncio.sleep(0.5)
    assert len(host.requests) == MAX_DOWNLOADS
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
