"""Credentials for a remote Triton: TLS, mutual TLS and a bearer token."""

import re
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from app.config.document import ConfigError, FollowedFile
from app.core.files import stamp_of
from app.grpc.rpc import Metadata, StreamCall, Transport, UnaryCall

CHECK_S = 1.0
"""Interval between two checks of a file for changes."""
MAX_TOKEN_BYTES = 16 * 1024
_TOKEN = re.compile(r"[!-~]+")

Content = TypeVar("Content")


class CredentialsUnusable(ConfigError):
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
        if paths := [path for path in (self.authorities, self.certificate, self.key) if path is not None]:
            return followed(paths, lambda: self.context("h2"))
        context = self.context("h2")
        return lambda: context

    def context(self, *protocols: str) -> ssl.SSLContext:
        """Creates a TLS context that offers ``protocols`` by ALPN. Raises CredentialsUnusable."""
        authorities = None
        if self.authorities is not None:
            try:
                authorities = self.authorities.read_text("ascii")
                # "" would select the authorities of the system
                ssl.create_default_context(cadata=authorities or "nothing")
            except (OSError, ValueError) as exc:
                raise CredentialsUnusable(f"{self.authorities}: {_reason_of(exc)}") from exc
        context = ssl.create_default_context(cadata=authorities)
        context.minimum_version = ssl.TLSVersion.TLSv1_2  # Debian's Python leaves this to OpenSSL's configuration
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, password=str)
            except (OSError, ValueError) as exc:
                raise CredentialsUnusable(f"{self.certificate}, {self.key}: {_reason_of(exc)}") from exc
        context.set_alpn_protocols(protocols)
        return context


def followed(paths: Sequence[Path], read: Callable[[], Content]) -> Callable[[], Content]:
    """Content of files, for callers that cannot wait. Changed files are read again; if invalid, the old value is kept.

    ``read`` may raise CredentialsUnusable; this function raises it too.
    """
    file = FollowedFile(
        paths[0],
        lambda _: ({path: stamp_of(path) for path in paths}, read()),
        "a file of credentials for Triton",
        others_of=lambda found: found[0],
    )
    content, checked_at = file.read_first()[1], time.monotonic()

    def newest() -> Content:
        nonlocal content, checked_at
        if (now := time.monotonic()) - checked_at >= CHECK_S:
            checked_at = now
            if (found := file.look()) is not None:
                content = found[1]
        return content

    return newest


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
        self._metadata = followed([token_file], lambda: (("authorization", f"Bearer {token_in(token_file)}"),))

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
