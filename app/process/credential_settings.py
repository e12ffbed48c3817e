"""The settings by which the gateway and a Triton that is not local prove to each other who they are."""

from pathlib import Path

from app.core.loopback import is_loopback
from app.settings import PREFIX, Settings, SettingsError
from app.triton.credentials import Credentials, CredentialsUnusable, TlsFiles, token_in

SYSTEM = "system"
"""A value of ``GATEWAY_TRITON_CA``: the authorities that the operating system trusts."""


def credentials_of(settings: Settings) -> Credentials:
    files, authorities = None, settings.triton_ca
    if authorities is not None:
        path = None if authorities == SYSTEM else Path(authorities)
        files = TlsFiles(path, settings.triton_cert, settings.triton_key)
    return Credentials(files, settings.triton_token_file)


def check_credentials(settings: Settings) -> None:
    """Raises SettingsError for settings that do not fit together, and for files that cannot be used."""
    complaint = _complaint(settings)
    if complaint:
        raise SettingsError(f"{PREFIX}{complaint}")
    credentials = credentials_of(settings)
    try:
        if credentials.tls is not None:
            credentials.tls.context()
        if credentials.token_file is not None:
            token_in(credentials.token_file)
    except CredentialsUnusable as exc:
        raise SettingsError(f"a file of credentials for Triton cannot be used: {exc}") from exc


def _complaint(settings: Settings) -> str:
    """Returns the fault, without the prefix ``GATEWAY_``; empty if there is none."""
    addresses = [each.strip() for each in settings.triton_url.split(",")]
    has_certificate, has_tls = settings.triton_cert is not None, settings.triton_ca is not None
    if has_certificate != (settings.triton_key is not None):
        return "TRITON_CERT and GATEWAY_TRITON_KEY belong together: set both, or none"
    if has_certificate and not has_tls:
        return f"TRITON_CERT needs GATEWAY_TRITON_CA: a file of authorities, or '{SYSTEM}'"
    if settings.embedded and (has_tls or settings.triton_token_file):
        return "TRITON_CA and GATEWAY_TRITON_TOKEN_FILE are not for the embedded Triton, which is on this machine"
    if has_tls and any(each.startswith("unix:") for each in addresses):
        return "TRITON_CA is not for an address that begins with unix:"
    if settings.triton_token_file is not None and not has_tls:
        for each in addresses:
            if not (each.startswith("unix:") or is_loopback(each.rpartition(":")[0].strip("[]"))):
                return f"TRITON_TOKEN_FILE: the token would travel to {each} unencrypted; set GATEWAY_TRITON_CA"
    return ""
