"""Writes models whose sequences sum numbers, and a ``gateway.yaml`` with a pipeline with sessions for each."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

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
STREAMED_ENSEMBLE = """
name: "streamed_chain"
platform: "ensemble"
max_batch_size: 4
input [
  { name: "NUMBER", data_type: TYPE_INT64, dims: [ 1 ] },
  { name: "COUNT", data_type: TYPE_INT64, dims: [ 1 ] }
]
output [ { name: "SUM", data_type: TYPE_INT64, dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "uint64_direct" model_version: -1 input_map { key: "NUMBER" value: "NUMBER" }
    output_map { key: "SUM" value: "first" } },
  { model_name: "streamed_oldest" model_version: -1 input_map { key: "NUMBER" value: "first" }
    input_map { key: "COUNT" value: "COUNT" } output_map { key: "SUM" value: "SUM" } }
] }
"""
ENSEMBLE = """
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


def write_session_models(repository: Path) -> None:
    for name in MODELS:
        write_session_model(repository, name)
    (repository / "summing_chain" / "1").mkdir(parents=True)
    (repository / "summing_chain" / "config.pbtxt").write_text(ENSEMBLE)


def write_session_model(repository: Path, name: str) -> None:
    write_model(repository / name, config_of(name, MODELS[name]))


def write_stream_models(repository: Path) -> None:
    """The models of streams, and ``uint64_direct``."""
    write_session_model(repository, "uint64_direct")
    for name, model in STREAMED.items():
        write_model(repository / name, config_of(name, model), STREAM_SCRIPT)
    (repository / "streamed_chain" / "1").mkdir(parents=True)
    (repository / "streamed_chain" / "config.pbtxt").write_text(STREAMED_ENSEMBLE)


def write_model(folder: Path, config: str, script: Path = SCRIPT) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.py").symlink_to(script)


def config_of(name: str, model: Summing) -> str:
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


def pipelines_of(**session: Any) -> dict[str, Any]:
    """``session``: the keys of each pipeline's ``session``."""
    names = [*MODELS, "summing_chain"]
    pipelines = {name: {"model": name, "session": session or True, "sample": {"NUMBER": 1}} for name in names}
    return {
        **pipelines,
        "ending": {"model": "short", "session": {"end_inputs": {"NUMBER": 0}}},
        "brief": {"model": "uint64_direct", "session": {"idle_s": 0.5}},
        "old": {"model": "uint64_direct", "session": {"max_s": 1.0}},
        "few": {"model": "uint64_direct", "session": {"max_open": 2}},
        "ordinary": {"model": "uint64_direct"},
        "meter": {
            "model": "uint64_oldest",
            "inputs": {"watts": {"tensor": "NUMBER"}},
            "outputs": {"sum": {"tensor": "SUM"}},
            "session": {"end_inputs": {"watts": 0}},
        },
    }


def write_config(folder: Path, **session: Any) -> str:
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump({"pipelines": pipelines_of(**session)}))
    return str(path)
