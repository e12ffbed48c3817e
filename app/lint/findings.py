"""The findings of the linter, and the solution of each. A finding has a stable code.

docs/reference/checks.md has a section for each code, with the same solution.
"""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    ERROR = "error"
    """Triton refuses to load it, or requests will fail or be lost."""
    WARNING = "warning"
    """It runs, and may hurt."""
    HINT = "hint"
    """It runs, and might run faster; never a fault."""
    UNKNOWN = "unknown"
    """Cannot be judged from what is written down; never a fault."""


class Code(StrEnum):
    UNREADABLE_CONFIG = "unreadable-config"
    DUPLICATE_KEY = "duplicate-key"
    FOLDER_NAME = "folder-name"
    MISSING_FILE = "missing-file"
    INVALID_SIZE = "invalid-size"
    INVALID_TENSOR = "invalid-tensor"
    INVALID_BATCHING = "invalid-batching"
    INVALID_SEQUENCE = "invalid-sequence"
    INVALID_ENSEMBLE = "invalid-ensemble"
    INVALID_SETTING = "invalid-setting"
    INVALID_WARMUP = "invalid-warmup"
    EXCESSIVE_SIZE = "excessive-size"
    UNKNOWN_MODEL = "unknown-model"
    UNKNOWN_VERSION = "unknown-version"
    UNKNOWN_TENSOR = "unknown-tensor"
    UNMAPPED_INPUT = "unmapped-input"
    UNWRITTEN_TENSOR = "unwritten-tensor"
    UNREAD_TENSOR = "unread-tensor"
    WRITTEN_TWICE = "written-twice"
    CYCLE = "cycle"
    DATATYPE_MISMATCH = "datatype-mismatch"
    SHAPE_MISMATCH = "shape-mismatch"
    BATCH_MISMATCH = "batch-mismatch"
    DECOUPLED_JOIN = "decoupled-join"
    OMITTED_INPUT = "omitted-input"
    BLS_CYCLE = "bls-cycle"
    CANCEL_INSTANCES = "cancel-instances"
    GATEWAY_YAML = "gateway-yaml"
    ROUTER_NEEDED = "router-needed"
    UNORDERED_STREAM = "unordered-stream"
    MISSING_SCRIPT = "missing-script"
    SCRIPT_SYNTAX = "script-syntax"
    UNKNOWN_BACKEND = "unknown-backend"
    OVERWRITTEN_VALUE = "overwritten-value"
    PARALLEL_FAILURE = "parallel-failure"
    SAMPLE = "sample"
    OTHER_SIGNATURE = "other-signature"
    COALESCING = "coalescing"
    NEEDS_SESSION = "needs-session"
    SESSION_IDLE = "session-idle"
    SESSION_PLACES = "session-places"
    SESSION_STATE = "session-state"
    PRESET_MISMATCH = "preset-mismatch"
    NOT_DECOUPLED = "not-decoupled"
    SPLIT_CHARACTERS = "split-characters"
    NO_HEALTH_CHECK = "no-health-check"
    SPECIAL_TOKENS = "special-tokens"
    BATCHES_OF_ONE = "batches-of-one"
    UNKNOWN_EDGE = "unknown-edge"


_WARNINGS = frozenset(
    {
        Code.EXCESSIVE_SIZE,
        Code.COALESCING,
        Code.ROUTER_NEEDED,
        Code.UNORDERED_STREAM,
        Code.UNKNOWN_BACKEND,
        Code.OVERWRITTEN_VALUE,
        Code.PARALLEL_FAILURE,
        Code.NEEDS_SESSION,
        Code.SESSION_IDLE,
        Code.SESSION_PLACES,
        Code.SESSION_STATE,
        Code.PRESET_MISMATCH,
        Code.NOT_DECOUPLED,
        Code.SPLIT_CHARACTERS,
        Code.NO_HEALTH_CHECK,
        Code.SPECIAL_TOKENS,
    }
)


@dataclass(frozen=True, slots=True)
class Finding:
    """``step`` counts from 1 within ``model``, an ensemble; it and ``tensor`` are None where they say nothing.

    ``pipeline``: for a finding in gateway.yaml, the pipeline that it is about.
    """

    code: Code
    text: str
    model: str | None = None
    step: int | None = None
    tensor: str | None = None
    pipeline: str | None = None

    @property
    def severity(self) -> Severity:
        if self.code is Code.UNKNOWN_EDGE:
            return Severity.UNKNOWN
        if self.code is Code.BATCHES_OF_ONE:
            return Severity.HINT
        return Severity.WARNING if self.code in _WARNINGS else Severity.ERROR


SOLUTION_BY_CODE = {
    Code.UNREADABLE_CONFIG: (
        "Correct the line that the finding names (`path:line:column`); a mistyped field or datatype comes with the "
        "nearest valid name. The fields are those of Triton's `model_config.proto`."
    ),
    Code.DUPLICATE_KEY: (
        "Give each entry the key that is meant, the tensor of the step's model, or remove the entry. One output cannot "
        "be two tensors of the ensemble: let its readers name the same tensor."
    ),
    Code.FOLDER_NAME: (
        "Rename the folder or correct `name` in `config.pbtxt`, or remove `name`: Triton then uses the folder's name. "
        "Use letters, digits, `_`, `-` and `.` in names."
    ),
    Code.MISSING_FILE: "Add the file to the model's folder, or remove the line of `config.pbtxt` that names it.",
    Code.INVALID_SIZE: (
        "Declare each dimension with its size, or with `-1` for any size. Without batching, `max_batch_size` is 0."
    ),
    Code.INVALID_TENSOR: (
        "Write what the finding asks for. If the backend is to complete the tensor, remove it from `config.pbtxt`: a "
        "Python model then needs `auto_complete_config`."
    ),
    Code.INVALID_BATCHING: "Write what the finding asks for. `dynamic_batching {}` alone has valid defaults.",
    Code.INVALID_SEQUENCE: "Write what the finding asks for. Each control has its own tensor, and is there once.",
    Code.INVALID_ENSEMBLE: (
        'Write `platform: "ensemble"`, no `backend`, and steps with their maps. Settings such as `instance_group` '
        "belong to the models of the steps."
    ),
    Code.INVALID_SETTING: "Write what the finding asks for, or remove the line: Triton then uses its default.",
    Code.INVALID_WARMUP: "Give each required input its data, with the datatype and the dims of the model.",
    Code.EXCESSIVE_SIZE: "Declare the size that the model needs, or `-1` for a dimension of any size.",
    Code.UNKNOWN_MODEL: "Correct `model_name` of the step, or add the model to the repository.",
    Code.UNKNOWN_VERSION: (
        "Use `model_version: -1` for the newest version, let `version_policy` load it, or add the folder (an ensemble "
        "needs an empty version folder too). Move folders that are no models out of the repository."
    ),
    Code.UNKNOWN_TENSOR: (
        "Correct the key in the map of the step: the key is the name of the tensor in the step's model."
    ),
    Code.UNMAPPED_INPUT: (
        "Map the input, or declare it `optional: true` in the model's configuration if the model works without it."
    ),
    Code.UNWRITTEN_TENSOR: "Correct the value in the map of the step, or map the output that has the tensor.",
    Code.UNREAD_TENSOR: "Remove the entry from the map. Triton drops outputs of a model that are not in a map.",
    Code.WRITTEN_TWICE: "Use a different name for each tensor of the ensemble.",
    Code.CYCLE: "Remove the cycle from the maps or steps. For a loop over models, use a BLS script.",
    Code.DATATYPE_MISMATCH: (
        "Correct the wrong declaration, or convert the tensor in one of the models. Triton does not convert datatypes."
    ),
    Code.SHAPE_MISMATCH: "Correct the wrong declaration, or reshape the tensor in one of the models.",
    Code.BATCH_MISMATCH: (
        "Set the step's `max_batch_size` to at least the ensemble's. If its model cannot batch, begin its `dims` with "
        "the batch dimension as `-1`, or set the ensemble's `max_batch_size` to 1."
    ),
    Code.DECOUPLED_JOIN: (
        "Write the other tensor with each response of the decoupled model, or move the other branch into a separate "
        "ensemble."
    ),
    Code.OMITTED_INPUT: (
        "Declare the input `optional: true` and handle the missing tensor in its model, or end the request with an "
        "early-exit error instead of omitting the output."
    ),
    Code.BLS_CYCLE: "Call a second model that has the same script and a different name, or do the work in the script.",
    Code.CANCEL_INSTANCES: (
        "Use one instance: `instance_group [ { kind: KIND_CPU count: 1 } ]`. Threads in this instance can serve many "
        "requests."
    ),
    Code.GATEWAY_YAML: "Correct the key in the line that the finding names.",
    Code.ROUTER_NEEDED: (
        "Copy the tensor in the script before changing it, or add a model (a router) that writes one copy for each "
        "reader."
    ),
    Code.UNORDERED_STREAM: "Use one instance if the order matters; use dynamic batching for throughput.",
    Code.MISSING_SCRIPT: "Put the script into the version folder that the finding names, or remove that folder.",
    Code.SCRIPT_SYNTAX: (
        "Correct the line that the finding names. `check` reads scripts with the Python of the gateway, which the "
        "finding names. If the models run a newer Python with newer syntax, run `check` with that Python, or ignore "
        "the finding."
    ),
    Code.UNKNOWN_BACKEND: (
        "Correct `backend` in `config.pbtxt`: `python`, `onnxruntime`, `tensorrt`, `pytorch`, and so on. Without a "
        "`config.pbtxt`, the name of the model file decides: `model.py`, `model.onnx`, `model.plan`, `model.pt`."
    ),
    Code.OVERWRITTEN_VALUE: "Give each entry the key that is meant, or remove the one that is not.",
    Code.PARALLEL_FAILURE: (
        "Check the input in a step before the parallel steps start; remove queue limits from parallel steps; or call "
        "the models from a BLS script. Any model may also fail unexpectedly: `check` reports only what it can read."
    ),
    Code.SAMPLE: (
        "Correct the line that the finding names. Paths of files are relative to the folder of `gateway.yaml`."
    ),
    Code.OTHER_SIGNATURE: (
        "Load the same version of the model everywhere. During a rolling update the finding disappears when the "
        "update is complete."
    ),
    Code.COALESCING: (
        "Correct the model, so that each output has one row for each row of the inputs, in the same order. If only "
        "rounding differs, set `coalesce: {tolerance: ...}`. Otherwise remove `coalesce`."
    ),
    Code.NEEDS_SESSION: (
        "Declare `session: true` for the pipeline, so that callers open sessions. Or list the model under `oip` "
        "instead of `pipelines`, and call it under `/v2` with the parameters `sequence_id`, `sequence_start` and "
        "`sequence_end`. If each request is independent, remove `sequence_batching`."
    ),
    Code.SESSION_IDLE: (
        "Raise `max_sequence_idle_microseconds` in the model's `config.pbtxt` above the time of a step and the "
        "longest pause together: the default of 1 s is too short for most sessions. Or lower `session: {idle_s: "
        "...}`, `timeout_s` and `stream: {timeout_s: ...}` of the pipeline."
    ),
    Code.SESSION_PLACES: (
        "Lower `session: {max_open: ...}`, or let the model run more sequences at a time: more instances, a "
        "larger `max_candidate_sequences` (oldest) or `max_batch_size` (direct)."
    ),
    Code.SESSION_STATE: (
        "Add the control input CONTROL_SEQUENCE_START, or let Triton keep the `state`. Let a model with a text as "
        "its sequence id use the `oldest` scheduler, or take the id as a number. If a step runs several stateful "
        "models, move everything else that can fail or exit early into other pipelines, or keep the state in one model."
    ),
    Code.PRESET_MISMATCH: (
        "Update the backend, or declare the field with the tensor that the model has: `parameters: {seed: {tensor: "
        "random_seed}}`. If the model is another backend, correct `preset`."
    ),
    Code.NOT_DECOUPLED: (
        "For TensorRT-LLM's LLM API write `decoupled: true` under `triton_config` in `1/model.yaml`; for the "
        "engine-based form, `model_transaction_policy { decoupled: true }` in the `config.pbtxt` of `tensorrt_llm` and "
        "of `tensorrt_llm_bls`. If the pipeline needs no streams, declare `stream: false`."
    ),
    Code.SPLIT_CHARACTERS: (
        "Call `tensorrt_llm_bls` with the parameter `accumulate_tokens` set to `true`. If the pipeline needs no "
        "streams, declare `stream: false`."
    ),
    Code.NO_HEALTH_CHECK: (
        'Write `parameters { key: "ENABLE_VLLM_HEALTH_CHECK" value { string_value: "true" } }` in `config.pbtxt`, and '
        "start Triton with `--model-control-mode=explicit`, so that the backend may unload the model."
    ),
    Code.SPECIAL_TOKENS: (
        "Set the backend to keep special tokens in the text: with TensorRT-LLM, `skip_special_tokens` of "
        "`postprocessing` is `False`. Or declare a boolean parameter `skip_special_tokens`, if the backend has one."
    ),
    Code.BATCHES_OF_ONE: (
        "Write `dynamic_batching {}` in `config.pbtxt`: Triton then joins requests that wait for an instance. For "
        "small requests set `coalesce: true` for the pipeline: the gateway then sends requests that wait as one "
        "call, which also saves Triton's cost of each request. If a batch of N items takes the model N times as long "
        "as one item, ignore the hint."
    ),
    Code.UNKNOWN_EDGE: (
        "Check the running server (`--triton`), which has the completed configuration, or declare the inputs and "
        "outputs."
    ),
}
