"""Credentials for a remote Triton: TLS, mutual TLS and a bearer token."""

import logging
import re
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from app.config.watch import stamp_of
from app.grpc.rpc import Metadata, StreamCall, Transport, UnaryCall

CHECK_S = 1.0
"""Interval between two checks of a file for changes."""
MAX_TOKEN_BYTES = 16 * 1024
_TOKEN = re.compile(r"[!-~]+")

Content = TypeVar("Content")

_log = logging.getLogger(__name__)


class CredentialsUnusable(Exception):
    """A credentials file is invalid or cannot be read. The message names the file, but never contains its content."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. ``authorities``: the trusted certificate authorities; None: the authorities of the system."""

    authorities: Path | None = None
    certificate: Path | None = None
    """The gateway's certificate for mutual TLS; ``key`` is its private key."""
    key: Path | None = None

    def followed(self) -> Callable[[], ssl.SSLContext]:
        """Returns a function that creates the context, and reloads changed files. Raises CredentialsUnusable."""
        return Followed(self._paths, lambda: self.context("h2"))

    @property
    def _paths(self) -> list[Path]:
        return [path for path in (self.authorities, self.certificate, self.key) if path is not None]

    def context(self, *protocols: str) -> ssl.SSLContext:
        """Creates a TLS context that offers ``protocols`` by ALPN. Raises CredentialsUnusable."""
        context = ssl.create_default_context(cadata=self._authorities())
        context.minimum_version = ssl.TLSVersion.TLSv1_2  # Debian's Python leaves this to OpenSSL's configuration
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, password=str)
            except (OSError, ValueError) as exc:
                raise CredentialsUnusable(f"{self.certificate}, {self.key}: {_reason_of(exc)}") from exc
        context.set_alpn_protocols(protocols)
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Creates credentials for grpcio, which does not reload changed files. Raises CredentialsUnusable."""
        self.context()  # checks the files
        authorities, key, certificate = (
            None if path is None else path.read_bytes() for path in (self.authorities, self.key, self.certificate)
        )
        return grpc.ssl_channel_credentials(authorities, key, certificate)

    def _authorities(self) -> str | None:
        """Raises CredentialsUnusable."""
        if self.authorities is None:
            return None
        try:
            text = self.authorities.read_text("ascii")
            ssl.create_default_context(cadata=text or "nothing")  # "" would select the authorities of the system
        except (OSError, ValueError) as exc:
            raise CredentialsUnusable(f"{self.authorities}: {_reason_of(exc)}") from exc
        return text


@dataclass(slots=True)
class Followed(Generic[Content]):
    """A value read from files. Changed files are read again; if they are invalid, the old value is kept.

    ``read`` may raise CredentialsUnusable.
    """

    paths: Sequence[Path]
    read: Callable[[], Content]
    content: Content = field(init=False)
    _stamp: object = None
    _checked_at: float = 0.0

    def __post_init__(self) -> None:
        """Raises CredentialsUnusable."""
        self._stamp, self._checked_at = self._stamp_now(), time.monotonic()
        self.content = self.read()

    def __call__(self) -> Content:
        now = time.monotonic()
        if now - self._checked_at >= CHECK_S:
            self._checked_at = now
            self._read_if_changed()
        return self.content

    def _read_if_changed(self) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.content = self.read()
        except CredentialsUnusable as exc:
            _log.error("credentials for Triton changed and cannot be used; the old ones stay: %s", exc)

    def _stamp_now(self) -> object:
        return [stamp_of(path) for path in self.paths]


def token_in(path: Path) -> str:
    """Raises CredentialsUnusable."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_TOKEN_BYTES + 1).decode("ascii").strip()
    except (OSError, ValueError) as exc:
        raise CredentialsUnusable(f"{path}: {_reason_of(exc)}") from exc
    if len(text) > MAX_TOKEN_BYTES or not _TOKEN.fullmatch(text):
        raise CredentialsUnusable(f"{path}: holds no token: one line of visible ASCII characters")
    return text


@dataclass(frozen=True, slots=True)
class Credentials:
    """``tls``: None for a plain connection. ``token_file``: None if calls have no token."""

    tls: TlsFiles | None = None
    token_file: Path | None = None


NO_CREDENTIALS = Credentials()


class TokenTransport:
    """Implements :class:`app.grpc.rpc.Transport`: each call of another transport gets a bearer token."""

    def __init__(self, transport: Transport, token_file: Path) -> None:
        """Raises CredentialsUnusable."""
        self._transport = transport
        self._metadata = Followed([token_file], lambda: (("authorization", f"Bearer {token_in(token_file)}"),))

    async def unary(self, path: str, message: bytes, timeout_s: float, metadata: Metadata = ()) -> UnaryCall:
        return await self._transport.unary(path, message, timeout_s, (*metadata, *self._metadata()))

    async def stream(self, path: str, message: bytes, timeout_s: float, metadata: Metadata = ()) -> StreamCall:
        return await self._transport.stream(path, message, timeout_s, (*metadata, *self._metadata()))

    async def close(self) -> None:
        await self._transport.close()


def _reason_of(exc: Exception) -> str:
    """Describes the error without the file's content."""
    if isinstance(exc, ssl.SSLError):
        return f"is not usable PEM: {exc.reason or 'it holds no certificate'}"
    return f"cannot be read: {exc.strerror}" if isinstance(exc, OSError) else "is not ASCII text"
