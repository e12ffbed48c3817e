"""Edits of gateway.yaml while the gateway runs: an invalid pipeline keeps its previous version."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.toolkit.processes import GatewayProcess, StartGateway
from tests.toolkit.waiting import eventually


def pipeline(name: str, model: str = "scripted", sample: str = "{}", tensor: str = "TEXT") -> str:
    return f"""
  {name}:
    model: {model}
    inputs: {{script: {{tensor: SCRIPT, kind: text}}}}
    outputs: {{text: {{tensor: {tensor}, kind: text}}}}
    sample: {{script: '{sample}'}}
"""


GOOD = "pipelines:" + pipeline("a") + pipeline("b") + pipeline("c")
BROKEN = (
    "pipelines:"
    + pipeline("a", model="scriptd")
    + pipeline("b", sample='{"raise": "out of ink"}')
    + pipeline("c", tensor="TXT")
    + pipeline("added", model="scriptd")
    + pipeline("good")
)
BOMB = "\n".join(["l0: &l0 [x]", *(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 8)}]" for n in range(1, 9))])


def write(path: Path, text: str) -> None:
    """Replaces the file in one step, as Kubernetes and most editors do."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


@contextmanager
def watched_readiness(gateway: GatewayProcess) -> Iterator[set[int]]:
    """Polls readiness during the block and yields the set of statuses."""
    statuses, stop = set[int](), threading.Event()

    def poll() -> None:
        while not stop.wait(0.02):
            statuses.add(httpx.get(f"{gateway.url}/health/ready").status_code)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        thread.join()


def test_an_invalid_edit_is_reported_and_a_valid_edit_applies(start_gateway: StartGateway, tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(GOOD)
    gateway = start_gateway(config=str(path))

    def ask(name: str) -> httpx.Response:
        return httpx.post(f"{gateway.url}/v1/pipelines/{name}", json={"script": "{}"})

    def lines_with(text: str) -> list[str]:
        return [line for line in gateway.log.splitlines() if text in line]

    with watched_readiness(gateway) as readiness:
        write(path, BROKEN)
        eventually(lambda: bool(lines_with("out of ink")))
        eventually(lambda: ask("good").status_code == 200)
        assert gateway.metric("config_reload_failed") == 1
        assert [ask(name).status_code for name in "abc"] == [200] * 3
        answer = ask("added")
        assert (answer.status_code, answer.json()["code"]) == (503, "model_not_ready")
        assert "Triton has no model 'scriptd'; did you mean 'scripted'?" in answer.json()["detail"]
        for name, message in {
            "a": ":3: pipelines.a.model 'scriptd' is not a model in Triton's repository; did you mean",
            "b": ":12: pipelines.b.sample failed: ",
            "c": ":17: pipelines.c.outputs.text.tensor 'TXT' is not a tensor of the model; did you mean 'TEXT'?",
        }.items():
            (line,) = lines_with(f"pipelines.{name}.")
            assert message in line
            assert "the last valid version stays active" in line
        write(path, BOMB)
        eventually(lambda: bool(lines_with("keys and values, with its aliases counted in full")))
        write(path, GOOD.replace("  c:", "  d:"))
        eventually(lambda: ask("d").status_code == 200)
        eventually(lambda: gateway.metric("config_reload_failed") == 0)
        assert [ask(name).status_code for name in ("a", "b", "c", "good")] == [200, 200, 404, 404]
    assert readiness == {200}
