"""Downloads the images that callers name by their addresses, from the hosts that the operator lists.

A caller must not reach other servers through the gateway (server-side request forgery). So a host is resolved once,
each of its addresses must be public, and the connection goes to an address that was checked. Each redirect is checked
like the first address. No proxy is used, because a proxy would resolve the host again.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import httpx

from app.api.bodies import media_type_of
from app.codecs.kinds import check_image, check_media_type

MAX_DOWNLOADS = 16
"""At a time, for all requests of this process."""
DOWNLOAD_S = 10.0
"""Time limit of one download, with its redirects."""
CONNECT_S = 3.0
MAX_REDIRECTS = 3
MAX_ADDRESS_CHARACTERS = 2048

_EMBEDDING = [ip_network(text) for text in ("::ffff:0:0/96", "64:ff9b::/96")]
"""IPv6 addresses of IPv4 hosts, which have the IPv4 address in the last 32 bits. Source: RFC 4291 and RFC 6052."""
_UNICAST = ip_network("2000::/3")
"""The IPv6 addresses that may be of the Internet. Outside are those that embed an IPv4 address in older forms
(``::7f00:1``, ``::ffff:0:7f00:1``), segments of routes (5f00::/16, RFC 9602), and all that IANA has not given out."""
_RESERVED = [
    ip_network(text)
    for text in ("2002::/16", "3fff::/20", "192.0.0.0/24", "192.88.99.0/24", "192.175.48.0/24", "168.63.129.16/32")
]
"""Those that :mod:`ipaddress` calls global, at least in some versions of Python: networks that embed any IPv4 address
(RFC 3056), for documentation (RFC 9637), of protocols (RFC 6890, RFC 7526, RFC 7534), and a service of Azure's hosts.

Source: IANA's registries of special-purpose addresses."""


def is_public(text: str) -> bool:
    """Whether an IP address is one of the public Internet."""
    ip = ip_address(text)
    if isinstance(ip, IPv6Address):
        if any(ip in network for network in _EMBEDDING):
            ip = IPv4Address(int(ip) & 0xFFFFFFFF)
        elif ip not in _UNICAST:
            return False
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _RESERVED)


async def resolve(host: str, port: int) -> Sequence[str]:
    """Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


@dataclass(eq=False)
class ImageDownloads:
    """``origins``: scheme, host in lower case, and the port unless it is the default.

    ``may_connect``: whether the gateway may connect to an IP address.
    """

    origins: Collection[str]
    resolve: Callable[[str, int], Awaitable[Sequence[str]]] = resolve
    may_connect: Callable[[str], bool] = is_public
    timeout_s: float = DOWNLOAD_S
    tls: ssl.SSLContext = field(default_factory=httpx.create_ssl_context)
    _free: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, MAX_DOWNLOADS))

    def check(self, address: str) -> httpx.URL:
        """Raises ValueError for an address that may not be downloaded."""
        if len(address) > MAX_ADDRESS_CHARACTERS:
            raise ValueError(f"has more than {MAX_ADDRESS_CHARACTERS} characters")
        try:
            url = httpx.URL(address)
        except httpx.InvalidURL as exc:
            raise ValueError("is not an address") from exc
        if url.userinfo:
            raise ValueError("has a user name or a password, which the gateway does not send")
        if f"{url.scheme}://{url.netloc.decode('ascii')}" not in self.origins:
            raise ValueError("has a host from which the gateway does not download images")
        return url

    async def download(self, address: str, count: Callable[[int], None]) -> bytes:
        """Returns the image. ``count`` gets the bytes of each piece, and may raise.

        Raises ValueError if there is no image at the address, and the errors of ``count``.
        """
        url = self.check(address)
        async with self._free:
            try:
                async with asyncio.timeout(self.timeout_s):
                    for _ in range(1 + MAX_REDIRECTS):
                        found = await self._get(url, count)
                        if isinstance(found, bytes):
                            return found
                        try:
                            url = self.check(str(url.join(found)))
                        except (httpx.InvalidURL, ValueError) as exc:
                            raise ValueError("is redirected to an address that may not be downloaded") from exc
            except TimeoutError as exc:
                raise ValueError(f"was not downloaded within {self.timeout_s:g} s") from exc
            except httpx.HTTPError as exc:
                raise ValueError("cannot be downloaded: its server does not answer properly") from exc
        raise ValueError(f"is redirected more than {MAX_REDIRECTS} times")

    async def _get(self, url: httpx.URL, count: Callable[[int], None]) -> bytes | str:
        """The image, or the address to which it is redirected. Raises ValueError or HTTPError, and those of ``count``.

        Each download has its own connection, because a certificate holds for one host and not for one IP address.
        """
        try:
            addresses = await self.resolve(url.host, url.port or (443 if url.scheme == "https" else 80))
        except OSError as exc:
            raise ValueError("cannot be downloaded: its host is not known") from exc
        if not addresses or not all(map(self.may_connect, addresses)):
            raise ValueError("cannot be downloaded: its host has no public IP address")
        # A request to an IP address in the name of the host, for which the certificate must be valid too.
        headers = {"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"}
        extensions = {"sni_hostname": url.raw_host.decode("ascii")}
        timeout = httpx.Timeout(self.timeout_s, connect=CONNECT_S)
        async with httpx.AsyncClient(verify=self.tls, trust_env=False, timeout=timeout, headers=headers) as client:
            for address in addresses:  # the first one that accepts a connection
                request = client.build_request("GET", url.copy_with(host=address), extensions=extensions)
                try:
                    response = await client.send(request, stream=True)
                    break
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    if address is addresses[-1]:
                        raise
            if response.has_redirect_location:
                return response.headers["location"]
            if response.status_code != httpx.codes.OK:
                raise ValueError(f"cannot be downloaded: its server answers {response.status_code}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ValueError("is compressed by its server, which the gateway does not decode")
            check_media_type(media_type_of(response.headers.get("content-type", "")), "image")
            content = bytearray()
            async for piece in response.aiter_raw():
                count(len(piece))
                content += piece
        check_image(bytes(content[:16]))
        return bytes(content)
