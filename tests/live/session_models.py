"""Models whose sequences sum numbers."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).parent / "session_model.py"
STREAM_SCRIPT = Path(__file__).parent / "session_stream_model.py"


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


ENSEMBLES = {"summing_chain": SUMMING_CHAIN}


def write_models(repository: Path, names: Iterable[str]) -> None:
    """``names``: of MODELS, STREAMED and ENSEMBLES."""
    for name in names:
        if name in ENSEMBLES:
            (repository / name / "1").mkdir(parents=True)
            (repository / name / "config.pbtxt").write_text(ENSEMBLES[name])
        else:
            write_model(repository / name, (MODELS | STREAMED)[name])


def write_model(folder: Path, model: Summing) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(_config_of(folder.name, model))
    (folder / "1" / "model.py").symlink_to(STREAM_SCRIPT if model.streams else SCRIPT)


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
