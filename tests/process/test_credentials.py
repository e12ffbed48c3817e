"""Settings for a Triton that is not local are checked before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from app.process.credential_settings import check_credentials, credentials_of
from app.settings import Settings, SettingsError
from app.triton.credentials import TlsFiles
from tests.toolkit.certificates import Authority

AWAY = "triton.example:8001"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    tls = Authority(tmp_path).files("gateway.example")
    (tmp_path / "token").write_text("secret")
    return {"ca": str(tls.authorities), "cert": tls.certificate, "key": tls.key, "token": tmp_path / "token"}


def settings_of(files: dict[str, Any], *names: str, **more: Any) -> Settings:
    setting = {"ca": "triton_ca", "cert": "triton_cert", "key": "triton_key", "token": "triton_token_file"}
    return Settings(**({"triton_url": AWAY} | {setting[name]: files[name] for name in names} | more))


@pytest.mark.parametrize(
    ("names", "more", "expected"),
    [
        ("ca cert", {}, "GATEWAY_TRITON_CERT and GATEWAY_TRITON_KEY belong together"),
        ("ca key", {}, "GATEWAY_TRITON_CERT and GATEWAY_TRITON_KEY belong together"),
        ("cert key", {}, "GATEWAY_TRITON_CERT needs GATEWAY_TRITON_CA"),
        ("ca", {"embedded": True}, "GATEWAY_TRITON_CA and GATEWAY_TRITON_TOKEN_FILE are not for the embedded Triton"),
        ("token", {"embedded": True}, "are not for the embedded Triton"),
        ("ca", {"triton_url": "unix:/run/triton"}, "GATEWAY_TRITON_CA is not for an address that begins with unix:"),
        ("token", {}, "GATEWAY_TRITON_TOKEN_FILE: the token would travel to triton.example:8001 unencrypted"),
        ("token", {"triton_url": "127.0.0.1:1, 10.0.0.1:1"}, "the token would travel to 10.0.0.1:1 unencrypted"),
        ("", {"triton_ca": "/nowhere/ca.pem"}, "/nowhere/ca.pem: cannot be read: No such file or directory"),
        ("ca", {"triton_token_file": Path("/nowhere/token")}, "/nowhere/token: cannot be read"),
    ],
)
def test_invalid_combinations_are_errors(
    files: dict[str, Any], names: str, more: dict[str, Any], expected: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        check_credentials(settings_of(files, *names.split(), **more))
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "more"),
    [
        ("", {}),
        ("ca", {}),
        ("ca cert key token", {}),
        ("", {"triton_ca": "system"}),
        ("token", {"triton_url": "127.0.0.1:8001"}),
        ("token", {"triton_url": "[::1]:8001,localhost:8001"}),
        ("token", {"triton_url": "unix:/run/triton"}),
        ("", {"embedded": True}),
    ],
)
def test_valid_combinations_are_accepted(files: dict[str, Any], names: str, more: dict[str, Any]) -> None:
    check_credentials(settings_of(files, *names.split(), **more))


def test_credentials_are_read_from_the_settings(files: dict[str, Any]) -> None:
    assert credentials_of(settings_of(files)).tls is None
    assert credentials_of(settings_of(files, triton_ca="system")).tls == TlsFiles()
    whole = credentials_of(settings_of(files, "ca", "cert", "key", "token"))
    assert whole.tls == TlsFiles(Path(files["ca"]), files["cert"], files["key"])
    assert whole.token_file == files["token"]
