"""Writes models with `sequence_batching` to a repository."""

from pathlib import Path

SCRIPT = Path(__file__).parent / "sequence_model.py"
TENSORS = """
input [ { name: "TEXT", data_type: TYPE_STRING, dims: [ 1 ] } ]
output [ { name: "JOINED", data_type: TYPE_STRING, dims: [ 1 ] } ]
output [ { name: "SEEN_ID", data_type: TYPE_STRING, dims: [ 1 ] } ]
"""
MODELS = {
    "seq_uint64": "UINT64",
    "seq_int64": "INT64",
    "seq_uint32": "UINT32",
    "seq_int32": "INT32",
    "seq_text": "STRING",
    "seq_plain": "",
}
"""Model -> the datatype of its correlation-id control."""


def write_sequence_models(repository: Path) -> None:
    for name, datatype in MODELS.items():
        _write(repository, name, _batching(datatype))
    _write(repository, "seq_iterative", _batching("UINT64", "iterative_sequence: true"))
    _write(repository, "seq_chain", _ensemble("seq_uint32"))
    _write(repository, "seq_outer", _ensemble("seq_chain"))
    _write(repository, "seq_mixed", _ensemble("seq_uint32", "seq_iterative"))


def _write(repository: Path, name: str, scheduling: str) -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    backend = 'platform: "ensemble"' if "ensemble_scheduling" in scheduling else 'backend: "python"'
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"\n{backend}\n{TENSORS}{scheduling}')
    if "ensemble" not in backend:
        (folder / "model.py").symlink_to(SCRIPT)


def _batching(datatype: str, rest: str = "") -> str:
    control = f'{{ name: "ID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{datatype} }} ] }}'
    return f"""sequence_batching {{
  oldest {{ max_candidate_sequences: 512 }}
  max_sequence_idle_microseconds: 60000000
  control_input [ {control if datatype else ""} ]
  {rest}
}}
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""


def _ensemble(*models: str) -> str:
    """The text goes through all models; the id is that of the last one."""
    tensors = ["TEXT", *(f"mid{index}" for index in range(1, len(models))), "JOINED"]
    steps = [
        f'{{ model_name: "{model}" model_version: -1 input_map {{ key: "TEXT" value: "{given}" }} '
        f'output_map {{ key: "JOINED" value: "{written}" }} '
        + ('output_map { key: "SEEN_ID" value: "SEEN_ID" } }' if written == "JOINED" else "}")
        for model, given, written in zip(models, tensors, tensors[1:], strict=False)
    ]
    return f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"
