"""The timeouts at shutdown match: the pod's grace period, the gateway's delay and drain, Triton's exit timeout."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.settings import read_settings
from tests.helm.cross_checks import faults
from tests.helm.rendering import environment_of, gateway_container, pod_spec, render, triton_container

seconds = {
    "delaySeconds": st.integers(1, 600),
    "longestStreamSeconds": st.integers(1, 86_400),
    "tritonExitSeconds": st.integers(1, 3_600),
    "marginSeconds": st.integers(10, 3_600),
}


def check_shutdown(shutdown: dict[str, int]) -> None:
    documents = render({"shutdown": shutdown})
    gateway, triton = gateway_container(documents), triton_container(documents)
    assert pod_spec(documents)["terminationGracePeriodSeconds"] == sum(shutdown.values())
    settings = read_settings(environment_of(gateway), {})
    assert (settings.shutdown_delay_s, settings.drain_s) == (shutdown["delaySeconds"], shutdown["longestStreamSeconds"])
    assert f"--exit-timeout-secs={shutdown['tritonExitSeconds']}" in triton["args"]
    assert faults(documents) == {}


@pytest.mark.parametrize("values", [(1, 1, 1, 10), (600, 86_400, 3_600, 3_600), (2, 30, 500, 70), (590, 9, 8, 11)])
def test_grace_period_drain_and_exit_timeout_agree(values: tuple[int, ...]) -> None:
    check_shutdown(dict(zip(seconds, values, strict=True)))


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(shutdown=st.fixed_dictionaries(seconds))
def test_any_grace_period_drain_and_exit_timeout_agree(shutdown: dict[str, int]) -> None:
    check_shutdown(shutdown)
