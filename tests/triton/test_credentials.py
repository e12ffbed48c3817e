"""TLS and tokens for a remote Triton, with real TLS servers and both gRPC clients."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from app.grpc import connection
from app.grpc.rpc import RpcError
from app.triton import credentials as module
from app.triton.connect import Kind, open_transport
from app.triton.credentials import Credentials, CredentialsUnusable, TlsFiles, token_in
from app.triton.grpc_errors import cause_of_refusal
from app.triton.triton_engine import TritonEngine
from tests.toolkit.certificates import Authority
from tests.toolkit.triton import FakeTriton, serving

YESTERDAY = datetime.now(UTC) - timedelta(days=1)
EXPIRED = {"not_before": YESTERDAY - timedelta(days=9), "not_after": YESTERDAY}


@pytest.fixture(params=["asyncio", "grpcio"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def short_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of grpcio do not close a TLS connection when their client does: it would wait for a second."""
    monkeypatch.setattr(connection, "CLOSE_S", 0.05)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    (tmp_path / "other").mkdir()
    return Authority(tmp_path / "other")


@asynccontextmanager
async def calling(url: str, kind: Kind, credentials: Credentials) -> AsyncIterator[TritonEngine]:
    async with open_transport(url, kind=kind, credentials=credentials) as transport:
        engine = TritonEngine(transport)
        yield engine
        await engine.close()


async def test_mutual_tls(kind: Kind, authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeTriton(), authority.server("127.0.0.1", asks_for_client=True)) as triton:
        for files, is_known in ((authority.files("gateway.example"), True), (TlsFiles(authority.path), False)):
            async with calling(triton.url, kind, Credentials(files)) as engine:
                assert await engine.answers() is is_known
            assert not (is_known and caplog.records)


async def test_the_certificate_must_match_the_host_name(kind: Kind, authority: Authority) -> None:
    """That of a DNS name covers its addresses."""
    async with serving(FakeTriton(), authority.server("triton.example")) as triton:
        for name, is_right in (("triton.example:8001", True), ("other.example:8001", False), ("", False)):
            credentials = Credentials(authority.files())
            async with open_transport(triton.url, kind=kind, authority=name, credentials=credentials) as transport:
                assert await TritonEngine(transport).answers() is is_right


REFUSALS = {
    "wrong authority": "no authority in GATEWAY_TRITON_CA signed the certificate of the server",
    "expired": "the certificate of the server or of the gateway has expired",
    "other name": "the certificate of the server does not match the name in GATEWAY_TRITON_URL",
    "no tls": "the server does not speak TLS at this port",
}


@pytest.mark.parametrize("fault", REFUSALS)
async def test_a_tls_error_is_logged_once_with_its_cause(
    fault: str, kind: Kind, authority: Authority, other: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    server = {
        "wrong authority": other.server("127.0.0.1"),
        "expired": authority.server("127.0.0.1", **EXPIRED),
        "other name": authority.server("other.example"),
        "no tls": None,
    }[fault]
    async with (
        serving(FakeTriton(), server) as triton,
        calling(triton.url, kind, Credentials(authority.files())) as engine,
    ):
        for _ in range(4):
            assert not await engine.answers()
            await asyncio.sleep(0.15)
    assert [record.getMessage() for record in caplog.records] == [f"Triton refuses the gateway: {REFUSALS[fault]}"]


def test_a_lost_triton_does_not_count_as_a_tls_error() -> None:
    for error in (RpcError("UNAVAILABLE", "failed to connect to x: Connection refused"), RpcError("INTERNAL", "ssl")):
        assert cause_of_refusal(error) == ""


class TestToken:
    async def test_every_call_over_tls_has_the_token(self, kind: Kind, authority: Authority) -> None:
        path = authority.folder / "token"
        path.write_text("secret-1\n")
        credentials = Credentials(authority.files(), path)
        async with (
            serving(recording := _Checking(), authority.server("127.0.0.1")) as triton,
            calling(triton.url, kind, credentials) as engine,
        ):
            assert await engine.answers()
        assert recording.seen == ["Bearer secret-1"]

    async def test_a_changed_token_is_used_and_an_unusable_one_keeps_the_old(
        self, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(module, "CHECK_S", 0.0)
        path = tmp_path / "token"
        path.write_text("secret-1")
        credentials = Credentials(None, path)
        async with serving(recording := _Checking()) as triton, calling(triton.url, kind, credentials) as engine:
            for text, calls in (("two words of secret-2", 3), ("secret-3", 1)):
                path.write_text(text)
                for _ in range(calls):
                    await engine.answers()
        assert recording.seen == [*["Bearer secret-1"] * 3, "Bearer secret-3"]
        assert len(caplog.records) == 1
        assert "secret" not in caplog.text

    async def test_a_rejected_token_is_logged_once(self, kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
        """And again after Triton has answered in between."""
        refusing = _Checking(refuses=True)
        async with serving(refusing) as triton, calling(triton.url, kind, Credentials()) as engine:
            for _ in range(2):
                assert not await engine.answers()
            assert [record.levelname for record in caplog.records] == ["ERROR"]
            assert "GATEWAY_TRITON_TOKEN_FILE" in caplog.text
            refusing.refuses = False
            assert await engine.answers()
            refusing.refuses = True
            assert not await engine.answers()
        assert len(caplog.records) == 2

    @pytest.mark.parametrize("content", [b"", b" \n", b"a b", b"a\nb", b"\xff", b"a\x00", b"x" * 20_000])
    def test_an_invalid_token_is_an_error(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "token").write_bytes(content)
        with pytest.raises(CredentialsUnusable):
            token_in(tmp_path / "token")


class TestFiles:
    @pytest.mark.parametrize("content", [None, b"", b"no certificate", b"\xff"])
    def test_unusable_authorities_are_an_error(self, tmp_path: Path, content: bytes | None) -> None:
        if content is not None:
            (tmp_path / "ca.pem").write_bytes(content)
        with pytest.raises(CredentialsUnusable, match=r"ca\.pem"):
            TlsFiles(tmp_path / "ca.pem").context()

    def test_a_key_of_another_certificate_is_an_error(self, authority: Authority, other: Authority) -> None:
        files = TlsFiles(authority.path, authority.files("a").certificate, other.files("b").key)
        with pytest.raises(CredentialsUnusable, match=r"client\.pem, .*client\.key: is not usable PEM: KEY_VALUES_MIS"):
            files.context()

    async def test_replaced_files_are_used_for_the_next_connection(
        self, authority: Authority, other: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "CHECK_S", 0.0)
        context = authority.files().followed()
        first = context()
        assert context() is first
        authority.path.write_bytes(other.path.read_bytes())
        assert context() is not first
        second = context()
        authority.path.write_text("broken")
        assert context() is second

    def test_the_context_verifies_names_and_certificates(self, authority: Authority) -> None:
        context = authority.files().context("h2")
        assert context.check_hostname
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


class _Checking(FakeTriton):
    """Records the tokens of its callers, or refuses them."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.refuses = refuses

    async def ServerLive(self, request: object, context: grpc.aio.ServicerContext) -> object:  # type: ignore[override]  # noqa: N802
        if self.refuses:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
        self.seen += [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        return await super().ServerLive(request, context)
