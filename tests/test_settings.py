"""Settings from the environment and from flags; unknown and invalid values are reported with their names."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.settings import Settings, SettingsError, is_service_link, read_settings


def error_of(environment: dict[str, str], **flags: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        read_settings(environment, flags)
    return str(caught.value)


def test_the_defaults() -> None:
    settings = read_settings({}, {})
    assert (settings.host, settings.port, settings.admin_port) == ("127.0.0.1", 8080, 8081)
    assert settings.max_body_bytes == 8 * 1024 * 1024
    assert (settings.timeout_s, settings.drain_s) == (30, 30)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("port", "9000", 9000),
        ("admin_port", "9001", 9001),
        ("embedded", "true", True),
        ("embedded", "0", False),
        ("docs", "off", False),
        ("timeout_s", "2.5", 2.5),
        ("config", "a/b.yaml", Path("a/b.yaml")),
        ("cors_origins", "https://a, https://b,", ("https://a", "https://b")),
        ("cors_origins", "", ()),
        ("cors_origins", "*", ("*",)),
        ("cors_origins", "null,http://[::1]:3000", ("null", "http://[::1]:3000")),
        ("cors_origins", "https://app_1.xn--bcher-kva.example:8443", ("https://app_1.xn--bcher-kva.example:8443",)),
        ("cors_origins", "capacitor://localhost", ("capacitor://localhost",)),
        ("cors_headers", "X-Tenant, b3,", ("X-Tenant", "b3")),
        ("allowed_hosts", "a.example, b.example,", ("a.example", "b.example")),
        ("image_hosts", "a.example, b.example:8443", ("https://a.example", "https://b.example:8443")),
        ("image_hosts", "http://a.example,https://b.example", ("http://a.example", "https://b.example")),
        ("triton_url", "unix:/run/x.sock", "unix:/run/x.sock"),
        ("triton_url", "a:1, unix:/b:2,[::1]:2", "a:1, unix:/b:2,[::1]:2"),
        ("expose_model_errors", "oip", "oip"),
        ("expose_model_errors", "True", "true"),
        ("expose_model_errors", "1", "true"),
        ("expose_model_errors", "off", "false"),
    ],
)
def test_variables_and_flags_are_parsed_alike(name: str, text: str, value: Any) -> None:
    assert getattr(read_settings({f"GATEWAY_{name.upper()}": text}, {}), name) == value
    assert getattr(read_settings({}, {name: text}), name) == value


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ({}, None),
        ({"embedded": True}, "gateway.yaml"),
        ({"embedded": True, "embedded_repository": "mine"}, "mine/gateway.yaml"),
        ({"embedded": True, "embedded_repository": "triton_models/"}, "gateway.yaml"),
        ({"embedded_repository": "mine"}, None),
    ],
)
def test_the_default_file_is_next_to_the_embedded_models(
    flags: dict[str, Any], path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = read_settings({}, flags)
    expected = None if path is None else Path(path)
    assert (settings.default_config, settings.config_path) == (expected, None)
    (tmp_path / "mine").mkdir()
    for each in ("gateway.yaml", "mine/gateway.yaml"):
        (tmp_path / each).touch()
    assert settings.config_path == expected
    assert read_settings({}, {**flags, "config": "named.yaml"}).config_path == Path("named.yaml")


@pytest.mark.parametrize(
    ("flags", "is_development"),
    [
        ({"embedded": True}, True),
        ({"embedded": True, "host": "0.0.0.0"}, False),
        ({"embedded": True, "api_keys_file": "keys.yaml"}, False),
        ({}, False),
    ],
)
def test_errors_of_models_and_explanations_are_shown_during_development(
    flags: dict[str, Any], is_development: bool
) -> None:
    settings = read_settings({}, flags)
    shown = "true" if is_development else "false"
    assert (settings.explain, settings.expose_model_errors) == (is_development, shown)
    for chosen in (True, False):
        settings = read_settings({}, {**flags, "explain": chosen, "expose_model_errors": "oip"})
        assert (settings.explain, settings.expose_model_errors) == (chosen, "oip")


def test_flags_override_variables() -> None:
    assert read_settings({"GATEWAY_PORT": "1"}, {"port": "2"}).port == 2


def test_an_empty_variable_counts_as_unset() -> None:
    settings = read_settings({"GATEWAY_CONFIG": "", "GATEWAY_EARLY_EXIT_KEY": "", "GATEWAY_PORT": ""}, {})
    assert (settings.config, settings.early_exit_key, settings.port) == (None, None, 8080)


def test_variables_of_other_programs_are_ignored() -> None:
    assert read_settings({"GATEWAYS": "1", "XGATEWAY_PORT": "x", "PATH": "/bin"}, {}) == Settings()


def test_an_unknown_variable_gets_a_suggestion() -> None:
    assert error_of({"GATEWAY_TIMEOUT": "1"}) == "GATEWAY_TIMEOUT is not a setting; did you mean GATEWAY_TIMEOUT_S?"
    assert (
        error_of({"GATEWAY_Q": "", "GATEWAY_ZZZZZZ": "1"})
        == "GATEWAY_Q is not a setting\nGATEWAY_ZZZZZZ is not a setting"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PORT", "http"),
        ("PORT", "70000"),
        ("ADMIN_PORT", "-1"),
        ("TIMEOUT_S", "0"),
        ("TIMEOUT_S", "nan"),
        ("MAX_BODY_BYTES", str(65 * 1024 * 1024)),
        ("DRAIN_S", "-1"),
        ("EMBEDDED", "perhaps"),
        ("LOG_FORMAT", "xml"),
        ("EXPOSE_MODEL_ERRORS", "v2"),
        ("LOG_TENSORS", "values"),
        ("EARLY_EXIT_KEY", "tooshort"),
        ("ALLOWED_HOSTS", "gateway.example,https://gateway.example"),
        ("ALLOWED_HOSTS", "*.example"),
        ("IMAGE_HOSTS", "*.example"),
        ("IMAGE_HOSTS", "A.example"),
        ("IMAGE_HOSTS", "a.example/images"),
        ("IMAGE_HOSTS", "a.example:443"),
        ("IMAGE_HOSTS", "ftp://a.example"),
        ("IMAGE_HOSTS", "https://user@a.example"),
        ("CORS_HEADERS", "X-Tenant,x-*"),
        ("CORS_HEADERS", "X-Tenant: 1"),
        *(("TRITON_URL", url) for url in ("a", "a:", "a:0", "a:65536", "a:1,,b:2", ":1", "unix:", "a:1,http://b")),
    ],
)
def test_an_invalid_value_is_reported_but_not_repeated(name: str, text: str) -> None:
    message = error_of({f"GATEWAY_{name}": text})
    assert message.startswith(f"GATEWAY_{name} is wrong: ")
    assert "tooshort" not in message


@pytest.mark.parametrize(
    ("origin", "hint"),
    [
        ("https://app.example.com/", "write https://app.example.com"),
        ("https://app.example.com/chat?a=b#c", "write https://app.example.com"),
        ("HTTPS://App.Example.com", "write https://app.example.com"),
        ("app.example.com", "write https://app.example.com"),
        ("localhost:5173", "write http://localhost:5173"),
        ("https://app.example.com:443", "write https://app.example.com"),
        ("http://app.example.com:80", "write http://app.example.com"),
        ("https://me:secret@app.example.com", "write https://app.example.com"),
        ("https://bücher.example", "write https://xn--bcher-kva.example"),
        ("https://a.example https://b.example", "write it as in https://app.example.com"),
        ("https://", "write it as in https://app.example.com"),
        ("https://a.example:http", "write it as in https://app.example.com"),
        ("https://[::1", "write it as in https://app.example.com"),
        ("https://*.example.com", "list each origin, or write * alone"),
        ("http://localhost:*", "list each origin, or write * alone"),
        ("file:///home/me/page.html", "is null"),
    ],
)
def test_an_invalid_origin_is_reported_with_the_right_form(origin: str, hint: str) -> None:
    message = error_of({"GATEWAY_CORS_ORIGINS": f"https://good.example,{origin}"})
    assert message.startswith("GATEWAY_CORS_ORIGINS is wrong: ")
    assert hint in message
    assert "secret" not in message


def test_every_invalid_value_has_its_own_line() -> None:
    assert len(error_of({"GATEWAY_PORT": "x", "GATEWAY_DRAIN_S": "x"}).splitlines()) == 2


def test_settings_are_frozen_and_do_not_show_the_key() -> None:
    settings = read_settings({"GATEWAY_EARLY_EXIT_KEY": "k" * 16}, {})
    with pytest.raises(ValidationError):
        settings.port = 1
    assert "kkkk" not in repr(settings)


class TestServiceLinks:
    """Variables that Kubernetes sets for a Service called ``gateway`` or ``gateway-...``."""

    LINKS = (
        ("GATEWAY_SERVICE_HOST", "10.0.0.1"),
        ("GATEWAY_SERVICE_PORT", "80"),
        ("GATEWAY_SERVICE_PORT_HTTP", "80"),
        ("GATEWAY_PORT", "tcp://10.0.0.1:80"),
        ("GATEWAY_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("GATEWAY_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("GATEWAY_PORT_80_TCP_PROTO", "tcp"),
        ("GATEWAY_PORT_53_UDP", "udp://10.0.0.1:53"),
        ("GATEWAY_ADMIN_SERVICE_HOST", "10.0.0.2"),
        ("GATEWAY_ADMIN_PORT", "tcp://10.0.0.2:81"),
        ("GATEWAY_TRITON_PORT_8001_TCP_PORT", "8001"),
    )

    @pytest.mark.parametrize(("name", "value"), LINKS)
    def test_service_links_are_recognized(self, name: str, value: str) -> None:
        assert is_service_link(name, value)
        assert read_settings({name: value}, {}) == Settings()

    def test_settings_and_variables_of_other_services_are_not_service_links(self) -> None:
        assert not [name for name in Settings.model_fields if is_service_link(f"GATEWAY_{name.upper()}", "8080")]
        assert not [name for name in ("KUBERNETES", "REDIS") if is_service_link(f"{name}_PORT", "tcp://10.0.0.1:80")]


def test_several_workers_explain_no_requests() -> None:
    assert [Settings(workers=workers, explain=True).receives_spans for workers in (1, 2)] == [True, False]
