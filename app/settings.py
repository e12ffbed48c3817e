"""Settings from ``GATEWAY_*`` environment variables and the flags of ``serve``. Unknown variables are an error.

Origins of pages as browsers send them: scheme, host and port. Source: the URL standard of WHATWG, 4.6 and 4.7.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from app.config.document import words_of
from app.core.errors import Unusable
from app.core.text import is_loopback, nearest_of
from app.triton.credentials import Credentials, CredentialsUnusable, TlsFiles, token_in

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def _origin(text: str) -> str:
    """Accepts an origin, ``null``, and ``*`` for every origin. Raises ValueError with the right form."""
    if text in ("*", "null"):
        return text
    if "*" in text:
        raise ValueError(f"'{text}' has a wildcard: list each origin, or write * alone, which allows every origin")
    if text.lower().startswith("file:"):
        raise ValueError("the origin of a page that is opened as a file is null")
    scheme = "http" if text.startswith(("localhost", "127.", "[::1]")) else "https"
    right = _origin_of(text if "://" in text else f"{scheme}://{text}")
    if text != right:
        form = f"write {right}" if right else "write it as in https://app.example.com"
        raise ValueError(f"an origin is a scheme, a host in lower case, and a port unless it is the default: {form}")
    return text


def _origin_of(url: str) -> str | None:
    """Returns None if the URL has no valid origin."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        port = "" if parts.port in (None, _DEFAULT_PORTS.get(parts.scheme)) else f":{parts.port}"
    except ValueError:
        return None
    origin = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}"
    return origin if _ORIGIN.fullmatch(origin) else None


PREFIX = "GATEWAY_"
DEFAULT_CONFIG = Path("gateway.yaml")
DEFAULT_REPOSITORY = Path("triton_models")

_SERVICE_LINK = re.compile(
    r"GATEWAY_([A-Z0-9_]+_)?(SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)|PORT_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?)"
)


_HEADER = re.compile(r"[A-Za-z0-9!#$%&'+.^_`|~-]+")
_WEB = re.compile("https?://")
_HAS_PORT = re.compile(r":\d{1,5}\Z")


class SettingsError(Unusable):
    """At least one setting is unknown or invalid. The message names each of them."""


def _triton_url(value: str) -> str:
    for address in map(str.strip, value.split(",")):
        scheme, separator, rest = address.partition("://")
        if separator and scheme in ("http", "https", "grpc", "grpcs"):
            raise ValueError(f"write {rest.rstrip('/')} without {scheme}://, with Triton's gRPC port, usually 8001")
        if not address.startswith("unix:") and not _HAS_PORT.search(address):
            raise ValueError(f"'{address}' has no port: Triton's gRPC port is usually 8001")
        host, _, port = address.rpartition(":")
        if address == "unix:" or not (address.startswith("unix:") or (host and 0 < int(port) < 65536)):
            raise ValueError(f"'{address[:100]}' is not an address; expected host:port or unix:/path")
    return value


def _redis_url(value: str) -> str:
    if not value.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("must begin with redis://, rediss:// or unix://")
    return value


def _header(name: str) -> str:
    if not _HEADER.fullmatch(name):
        raise ValueError(f"'{name}' is not the name of a header: write it as in X-Tenant, without wildcards")
    return name


def _host(name: str) -> str:
    if "/" in name or "*" in name:
        raise ValueError(f"'{name}' is not the name of a host: write it as in gateway.example.com")
    return name


def _image_host(host: str) -> str:
    """Returns the origin."""
    origin = host if "://" in host else f"https://{host}"
    if not _WEB.match(origin) or origin != _origin_of(origin):
        form = "write it as in images.example.com, images.example.com:8443 or http://images.example.com"
        raise ValueError(f"'{origin.removeprefix('https://')}' is not a host: {form}")
    return origin


def _switch(value: Any) -> Any:
    """Accepts the usual words for a boolean."""
    text = str(value).lower()
    return {"1": "true", "yes": "true", "on": "true", "0": "false", "no": "false", "off": "false"}.get(text, text)


_LIST = BeforeValidator(
    lambda value: [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
)
"""A text with commas."""


def _is_embedded(given: dict[str, Any]) -> bool:
    return bool(given.get("embedded"))


def _is_development(given: dict[str, Any]) -> bool:
    """Whether the gateway starts Triton itself, and only this machine can call it, without keys."""
    return _is_embedded(given) and given.get("api_keys_file") is None and is_loopback(given.get("host", ""))


class Settings(BaseModel):
    """``Settings(...)`` reads no environment variables; :func:`read_settings` does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port of the API")
    admin_port: int = Field(8081, ge=0, le=65535, description="port of /metrics and /health, for operators")
    workers: int = Field(1, ge=1, le=256, description="number of processes that serve the API")
    triton_url: Annotated[str, AfterValidator(_triton_url)] = Field(
        "127.0.0.1:8001",
        description="Triton's gRPC address, host:port or unix:/path; several: with commas, or one DNS name",
    )
    grpc: Literal["asyncio", "grpcio"] = Field(
        "asyncio", description="gRPC client for the calls to Triton: the gateway's own (asyncio), or grpcio"
    )
    triton_metrics_url: str | None = Field(None, description="Triton's Prometheus page, relayed at /metrics/triton")
    triton_ca: str | None = Field(
        None, description="PEM file of the authorities for TLS to Triton, or 'system'; without it, no TLS"
    )
    triton_cert: Path | None = Field(None, description="PEM file of the gateway's own certificate, for mutual TLS")
    triton_key: Path | None = Field(None, description="PEM file of the private key of that certificate")
    triton_token_file: Path | None = Field(
        None, description="file of a bearer token for each call to Triton; read again when it changes"
    )
    config: Path | None = Field(
        None,
        description="the file that declares the pipelines; without a file, every ready model is served under its name",
    )
    embedded: bool = Field(False, description="start Triton together with the gateway")
    triton_repair: bool = Field(
        default_factory=_is_embedded, description="reload a model whose Python process died (true for --embedded)"
    )
    embedded_repository: Path = Field(DEFAULT_REPOSITORY, description="the embedded Triton's model repository")
    embedded_venv: Path = Field(Path(".venv-triton"), description="the Python environment of its models")
    api_keys_file: Path | None = Field(
        None, description="the file of API keys; with it, each request needs one of these keys"
    )
    cors_origins: Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], _LIST] = Field(
        (), description="origins whose pages may call the gateway, separated by commas; * for every origin"
    )
    cors_headers: Annotated[tuple[Annotated[str, AfterValidator(_header)], ...], _LIST] = Field(
        (), description="further request headers that these pages may send, separated by commas"
    )
    allowed_hosts: Annotated[tuple[Annotated[str, AfterValidator(_host)], ...], _LIST] = Field(
        (),
        description="names under which the gateway may be called besides localhost, separated by commas (default: all; "
        "on a loopback address without keys: none)",
    )
    image_hosts: Annotated[tuple[Annotated[str, AfterValidator(_image_host)], ...], _LIST] = Field(
        (),
        description="hosts from which the gateway downloads the images of chats by https, separated by commas; "
        "http://HOST allows http (default: none)",
    )
    redis_url: Annotated[str, AfterValidator(_redis_url)] | None = Field(
        None, description="Redis for resumable streams that several processes share", repr=False
    )
    max_connections: int = Field(4096, ge=1, le=1_000_000, description="limit of open connections to the API")
    max_body_bytes: int = Field(
        8 * 1024 * 1024, ge=1, le=64 * 1024 * 1024, description="limit of one request body, in bytes"
    )
    max_bytes_in_flight: int = Field(
        256 * 1024 * 1024, ge=1, description="limit of all request bodies in memory, in bytes"
    )
    max_kept_bytes: int = Field(
        256 * 1024 * 1024, ge=1024 * 1024, description="limit of the events kept for resumable streams, in bytes"
    )
    max_kept_streams: int = Field(20_000, ge=1, description="limit of resumable streams, running and ended")
    shared_memory_bytes: int = Field(
        default_factory=lambda given: 256 * 1024 * 1024 * _is_embedded(given),
        ge=0,
        description="bytes of shared memory for large tensors to and from Triton (0: off; 256 MiB for --embedded)",
    )
    timeout_s: float = Field(30.0, gt=0, le=86_400, description="default deadline of a pipeline, in seconds")
    shutdown_delay_s: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="time after SIGTERM in which requests are still served while load balancers remove the gateway, "
        "in seconds",
    )
    drain_s: float = Field(
        30.0, ge=0, le=86_400, description="time that running requests and streams have after that, in seconds"
    )
    ping_s: float = Field(
        15.0, gt=0, le=3600, description="interval of the heartbeat comments on an idle stream, in seconds"
    )
    send_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="time without progress after which a slow client's stream ends, in seconds"
    )
    console: bool = Field(True, description="serve the console at /")
    console_load: bool = Field(
        default_factory=_is_embedded,
        description="the console offers to send a request many times (true for --embedded)",
    )
    docs: bool = Field(True, description="serve /docs and /openapi.json")
    tokenizers: Path | None = Field(
        None, description="folder with a tokenizer folder for each LLM backend, by the name of its model"
    )
    early_exit_key: str | None = Field(None, min_length=16, description="key for signed early exits", repr=False)
    log_tensors: Literal["off", "shapes"] = Field(
        "off", description="log the name, datatype and shape of each tensor, with the request id"
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^\s?#]+$",
        description="the OpenTelemetry collector to send spans to (OTLP over HTTP, http://host:4318)",
    )
    explain: bool = Field(
        default_factory=_is_development,
        description="let every caller explain requests with X-Explain, for development; otherwise only the keys "
        "with explain: true (true for --embedded on a loopback address without keys)",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level to log")
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="one JSON object a line, or plain text; auto: text if standard error is a terminal"
    )
    expose_model_errors: Annotated[Literal["false", "true", "oip"], BeforeValidator(_switch)] = Field(
        default_factory=lambda given: "true" if _is_development(given) else "false",
        description="show callers Triton's message about a failed model: true, for development, or oip: only under "
        "/v2, where Triton shows it too (true for --embedded on a loopback address without keys)",
    )

    @property
    def config_path(self) -> Path | None:
        """The file to follow: the configured file, otherwise ``default_config`` if it exists."""
        default = self.default_config
        return self.config or (default if default is not None and default.exists() else None)

    @property
    def default_config(self) -> Path | None:
        """The ``gateway.yaml`` of the embedded Triton's models. None in front of a Triton with other models."""
        return config_beside(self.embedded_repository) if self.embedded else None

    @property
    def is_development(self) -> bool:
        return _is_development(vars(self))

    @property
    def traces_url(self) -> str | None:
        """The collector's address for spans, with its path."""
        return None if self.otlp_endpoint is None else f"{self.otlp_endpoint.rstrip('/')}/v1/traces"

    @property
    def receives_spans(self) -> bool:
        """Whether some caller may explain requests, now or after a change of the keys: then Triton sends its spans."""
        return self.workers == 1 and (self.explain or self.api_keys_file is not None)

    @property
    def without_effect(self) -> str:
        """What is set but has no effect with this number of workers, for the log; empty if nothing is."""
        is_ignored = self.explain and "explain" in self.model_fields_set and self.workers > 1
        return "GATEWAY_EXPLAIN has no effect: explanations need GATEWAY_WORKERS=1" if is_ignored else ""

    @property
    def models_venv(self) -> Path:
        """The models' environment; falls back to that of the gateway's checkout, then to the current environment."""
        own = Path(sys.prefix)
        return next((each for each in (self.embedded_venv, own.parent / self.embedded_venv) if each.exists()), own)


def config_beside(repository: Path) -> Path:
    """Returns the path of a repository's gateway.yaml: in the repository; for the default repository, in ``.``."""
    return DEFAULT_CONFIG if repository == DEFAULT_REPOSITORY else repository / DEFAULT_CONFIG


def read_settings(environment: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """Flags override environment variables. Empty variables count as unset. Raises SettingsError."""
    own = {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIX) and not is_service_link(name, value)
    }
    valid, unknown = [name.upper() for name in Settings.model_fields], []
    for name in sorted(own):
        if (bare := name.removeprefix(PREFIX)).upper() not in valid:
            found = nearest_of(bare, valid)
            unknown.append(f"{name} is not a setting" + (f"; did you mean {PREFIX}{found}?" if found else ""))
    if unknown:
        raise SettingsError("\n".join(unknown))
    variables = {name.removeprefix(PREFIX).lower(): value for name, value in own.items() if value}
    try:
        return Settings.model_validate({**variables, **flags})
    except ValidationError as exc:
        wrong = [
            f"{PREFIX}{str(each['loc'][0]).upper()} is wrong: {words_of(each)}"
            for each in exc.errors()
            if each["type"] != "default_factory_not_called"  # the default depends on a value that is wrong
        ]
        raise SettingsError("\n".join(wrong)) from exc


SYSTEM = "system"
"""A value of ``GATEWAY_TRITON_CA``: the authorities that the operating system trusts."""


def credentials_of(settings: Settings) -> Credentials:
    files, authorities = None, settings.triton_ca
    if authorities is not None:
        path = None if authorities == SYSTEM else Path(authorities)
        files = TlsFiles(path, settings.triton_cert, settings.triton_key)
    return Credentials(files, settings.triton_token_file)


def check_credentials(settings: Settings) -> Credentials:
    """Raises SettingsError for settings that do not fit together, and for files that cannot be used."""
    addresses = [each.strip() for each in settings.triton_url.split(",")]
    has_certificate, has_tls = settings.triton_cert is not None, settings.triton_ca is not None
    are_local = [each.startswith("unix:") or is_loopback(each.rpartition(":")[0].strip("[]")) for each in addresses]
    complaint = ""
    if has_certificate != (settings.triton_key is not None):
        complaint = "TRITON_CERT and GATEWAY_TRITON_KEY belong together: set both, or none"
    elif has_certificate and not has_tls:
        complaint = f"TRITON_CERT needs GATEWAY_TRITON_CA: a file of authorities, or '{SYSTEM}'"
    elif settings.embedded and (has_tls or settings.triton_token_file):
        complaint = "TRITON_CA and GATEWAY_TRITON_TOKEN_FILE are not for the embedded Triton, which is on this machine"
    elif has_tls and any(each.startswith("unix:") for each in addresses):
        complaint = "TRITON_CA is not for an address that begins with unix:"
    elif settings.triton_token_file is not None and not has_tls and not all(are_local):
        away = addresses[are_local.index(False)]
        complaint = f"TRITON_TOKEN_FILE: the token would travel to {away} unencrypted; set GATEWAY_TRITON_CA"
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
    return credentials


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes injects the variable for a Service whose name begins with ``gateway``. It is not a setting.

    True for names such as ``GATEWAY_SERVICE_HOST`` and for values such as ``GATEWAY_PORT=tcp://...``.
    """
    is_address = name.startswith(PREFIX) and name.endswith("_PORT") and "://" in value
    return is_address or _SERVICE_LINK.fullmatch(name) is not None
