"""Models whose sequences sum numbers, and a Triton that is killed and starts again."""

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import httpx

from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.processes import GatewayProcess, wait_until_ready
from tests.toolkit.waiting import eventually

SCRIPT = Path(__file__).parent / "session_model.py"


class Summing(NamedTuple):
    """``datatype``: of the correlation-id control; empty for none. ``candidates``: 0 for the direct scheduler."""

    datatype: str
    candidates: int = 0
    batch: int = 0
    instances: int = 1
    idle_s: float = 60.0
    streams: bool = False
    """Whether the model is decoupled: a step sends ``COUNT`` sums."""

    @property
    def places(self) -> int:
        return self.instances * (self.candidates or max(self.batch, 1))


MODELS = {
    "text_direct": Summing("STRING", instances=4),
    "text_oldest": Summing("STRING", candidates=64, batch=64, instances=2),
    "uint64_direct": Summing("UINT64", batch=64),
    "uint64_oldest": Summing("UINT64", candidates=4, batch=4, instances=2),
    "int64_oldest": Summing("INT64", candidates=8),
    "uint32_direct": Summing("UINT32", batch=4, instances=2),
    "int32_oldest": Summing("INT32", candidates=64, batch=4),
    "plain_direct": Summing("", batch=4),
    "short": Summing("UINT64", idle_s=2.0),
    "default_idle": Summing("UINT64", idle_s=0),
}
STREAMED = {
    "streamed_direct": Summing("UINT64", instances=2, streams=True),
    "streamed_oldest": Summing("UINT64", candidates=64, batch=4, streams=True),
    "streamed_short": Summing("UINT64", idle_s=2.0, streams=True),
}
SUMMING_CHAIN = """
name: "summing_chain"
platform: "ensemble"
max_batch_size: 4
input [ { name: "NUMBER", data_type: TYPE_INT64, dims: [ 1 ] } ]
output [
  { name: "SUM", data_type: TYPE_INT64, dims: [ 1 ] },
  { name: "STEPS", data_type: TYPE_INT64, dims: [ 1 ] }
]
ensemble_scheduling { step [
  { model_name: "uint64_direct" model_version: -1 input_map { key: "NUMBER" value: "NUMBER" }
    output_map { key: "SUM" value: "first" } },
  { model_name: "uint32_direct" model_version: -1 input_map { key: "NUMBER" value: "first" }
    output_map { key: "SUM" value: "SUM" } output_map { key: "STEPS" value: "STEPS" } }
] }
"""


def write_models(repository: Path, names: Iterable[str]) -> None:
    """``names``: of MODELS and STREAMED, or ``summing_chain``."""
    for name in names:
        (repository / name / "1").mkdir(parents=True)
        if name == "summing_chain":
            (repository / name / "config.pbtxt").write_text(SUMMING_CHAIN)
        else:
            (repository / name / "config.pbtxt").write_text(_config_of(name, (MODELS | STREAMED)[name]))
            (repository / name / "1" / "model.py").symlink_to(SCRIPT)


def _config_of(name: str, model: Summing) -> str:
    control = f'{{ name: "ID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{model.datatype} }} ] }}'
    scheduler = f"oldest {{ max_candidate_sequences: {model.candidates} }}" if model.candidates else "direct {}"
    names = ("SUM", "STEPS") if model.streams else ("SUM", "STEPS", "OPEN")
    outputs = ", ".join(f'{{ name: "{each}", data_type: TYPE_INT64, dims: [ 1 ] }}' for each in names)
    inputs = 'input [ { name: "COUNT", data_type: TYPE_INT64, dims: [ 1 ] } ]' if model.streams else ""
    return f"""
name: "{name}"
backend: "python"
max_batch_size: {model.batch}
input [ {{ name: "NUMBER", data_type: TYPE_INT64, dims: [ 1 ] }} ]
{inputs}
input [ {{ name: "SLEEP", data_type: TYPE_FP32, dims: [ 1 ], optional: true }} ]
output [ {outputs} ]
sequence_batching {{
  {scheduler}
  max_sequence_idle_microseconds: {int(model.idle_s * 1e6)}
  control_input [ {control if model.datatype else ""} ]
}}
instance_group [ {{ kind: KIND_CPU count: {model.instances} }} ]
model_transaction_policy {{ decoupled: {str(model.streams).lower()} }}
"""


def kill_triton(triton: EmbeddedTriton) -> int:
    """Returns the identifier of the killed process, for ``wait_for_new_triton``."""
    killed = triton.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    return killed


def wait_for_new_triton(gateway: GatewayProcess, triton: EmbeddedTriton, killed: int) -> None:
    """Waits for a Triton other than the process ``killed``.

    The gateway may never be unready: a Triton with small models starts within the two seconds between its questions.
    """
    eventually(lambda: triton.pid not in (None, killed) and answers_ready(triton))
    wait_until_ready(gateway)


def answers_ready(triton: EmbeddedTriton) -> bool:
    try:
        return httpx.get(f"{triton.http_url}/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False
