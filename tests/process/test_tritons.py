"""Settings for a Triton that is not local, and the canaries of the pipelines."""

from pathlib import Path
from typing import Any

import pytest

from app.pipelines.catalog import Catalog
from app.process.tritons import Declarations
from app.settings import Settings, SettingsError, check_credentials, credentials_of
from app.triton.credentials import TlsFiles
from tests.toolkit.certificates import Authority
from tests.toolkit.engine import FakeEngine
from tests.toolkit.models import ensemble, model

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


STEP, UNRELATED = (model("X FP32 [1]", "Y FP32 [1]", name=name) for name in ("step", "unrelated"))


async def declarations_of(folder: Path, pipelines: str) -> Declarations:
    (folder / "gateway.yaml").write_text(f"pipelines: {pipelines}")
    catalog = Catalog(FakeEngine.of(ensemble("chain", STEP), STEP, UNRELATED), folder / "gateway.yaml")
    catalog.load_file()
    await catalog.refresh()
    return Declarations(catalog)


@pytest.mark.parametrize(
    ("other", "deadline_s"),
    [
        ("model: step, timeout_s: 300", 300.0),
        ("model: step, timeout_s: 20, stream: {timeout_s: 400}", 400.0),
        ("model: step, timeout_s: 1", 30.0),
        ("model: unrelated, timeout_s: 300", 30.0),
    ],
)
async def test_the_deadline_is_the_longest_of_the_pipelines_that_share_a_model(
    tmp_path: Path, other: str, deadline_s: float
) -> None:
    """30 s is the deadline of requests that name a model in place of a pipeline."""
    sampled = "{model: chain, timeout_s: 2, sample: {X: [1.0]}}"
    declared = await declarations_of(tmp_path, f"{{sampled: {sampled}, other: {{{other}}}}}")
    (canary,) = declared.canaries().values()
    assert (canary.models, canary.deadline_s) == ({"chain", "step"}, deadline_s)


@pytest.mark.parametrize(
    ("model", "first_output_s", "engine_errors"),
    [("chain", 300.0, ["A", "B", "C"]), ("step", 300.0, []), ("unrelated", 0.0, [])],
)
async def test_a_model_has_the_longest_first_output_time_and_the_engine_errors_of_its_pipelines(
    tmp_path: Path, model: str, first_output_s: float, engine_errors: list[str]
) -> None:
    """A pipeline over an ensemble declares the messages of the ensemble, and not those of its steps."""
    pipelines = (
        "{long: {model: chain, stream: {first_output_s: 300}, engine_errors: [A, B]}, "
        "two: {model: chain, engine_errors: [C]}, short: {model: step, stream: true}}"
    )
    declared = (await declarations_of(tmp_path, pipelines)).of(model)
    assert (declared.first_output_s, declared.engine_errors) == (first_output_s, engine_errors)
