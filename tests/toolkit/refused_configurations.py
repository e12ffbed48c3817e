"""Configurations that Triton refuses to load, each beside a neighbour that it loads."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SCRIPT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensor = pb_utils.Tensor("o", np.zeros((1, 3), np.float32))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
"""
COMPLETING = """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "i", "data_type": "TYPE_FP32", "dims": [3]})
        config.add_output({"name": "o", "data_type": "TYPE_FP32", "dims": [3]})
        return config
"""
IN = 'input { name: "i" data_type: TYPE_FP32 dims: [ -1 ] }\n'
OUT = 'output { name: "o" data_type: TYPE_FP32 dims: [ -1 ] }\n'
PYTHON = 'backend: "python"\n'
MODEL = PYTHON + IN + OUT
BATCHED = f"max_batch_size: 4\n{MODEL}"
ENSEMBLE = f'platform: "ensemble"\n{IN}{OUT}'
IN_MAP = 'input_map { key: "i" value: "i" }'
OUT_MAP = 'output_map { key: "o" value: "o" }'
STEP = f'step {{ model_name: "ident" model_version: -1 {IN_MAP} {OUT_MAP} }}'
STEPS = f"ensemble_scheduling {{ {STEP} }}\n"


@dataclass(frozen=True)
class Refused:
    """``template``: with one ``%s`` for ``broken`` and ``sound``. ``text``: of the finding. ``triton``: of its log."""

    code: str
    text: str
    triton: str
    template: str
    broken: str
    sound: str
    script: str = ""
    """Added to the scripts of both."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Of the sound model. Its version folders are 1 and those that are named here."""

    def write(self, repository: Path, name: str) -> None:
        """Writes ``name_broken`` and ``name_sound`` to the repository."""
        for kind, text, files in (("broken", self.broken, {}), ("sound", self.sound, self.files)):
            folder = repository / f"{name}_{kind}"
            (folder / "1").mkdir(parents=True)
            (folder / "1" / "model.py").write_text(SCRIPT + self.script)
            (folder / "config.pbtxt").write_text(self.template % text)
            for path, content in files.items():
                (folder / path).parent.mkdir(exist_ok=True)
                (folder / path).write_text(content)


def ident(repository: Path) -> None:
    """Writes the model that the ensembles run."""
    (repository / "ident" / "1").mkdir(parents=True)
    (repository / "ident" / "1" / "model.py").write_text(SCRIPT)
    (repository / "ident" / "config.pbtxt").write_text(MODEL)


_INPUT = f'{PYTHON}{OUT}input {{ name: "i" %s }}'
_FIRST = 'name: "first" data_type: TYPE_FP32 dims: [ 2, 3 ] zero_data: true'
_DATA = 'inputs { key: "i" value { data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } }'
_TEXTS = {
    "PYTHON": PYTHON,
    "IN": IN,
    "OUT": OUT,
    "MODEL": MODEL,
    "BATCHED": BATCHED,
    "ENSEMBLE": ENSEMBLE,
    "IN_MAP": IN_MAP,
    "OUT_MAP": OUT_MAP,
    "STEP": STEP,
    "STEPS": STEPS,
    "INPUT": _INPUT,
    "BATCHED_INPUT": f"max_batch_size: 4\n{_INPUT}",
    "CONTROL": f'{BATCHED}sequence_batching {{ control_input {{ name: "S" control {{ %s }} }} }}',
    "START": "kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ]",
    "STATE": f'{BATCHED}sequence_batching {{ state {{ input_name: "s" output_name: "t" data_type: TYPE_FP32 '
    "dims: [ 2, -1 ] initial_state { %s } } }",
    "FIRST": _FIRST,
    "QUEUE": f"{BATCHED}dynamic_batching {{ %s }}",
    "DELAY": "default_timeout_microseconds: 9 timeout_action: DELAY",
    "BATCH_INPUT": f'{BATCHED}batch_input {{ target_name: "n"',
    "GROUP": f"{MODEL}instance_group {{ %s }}",
    "WARMUP": f'{BATCHED}model_warmup {{ name: "w" batch_size: 1 %s }}',
    "DATA": _DATA,
    "POLICY": f"{MODEL}version_policy {{ %s }}",
    "-": "",
}
"""What the words in angle brackets of _TABLE stand for."""
_FILES = {
    "label_filename is": {"labels.txt": "cat\ndog\n"},
    "input_data_file is": {"warmup/data": "12345678"},
    "data_file is": {"initial_state/data": "123456781234567812345678"},
}
"""The beginning of the finding -> the files of the sound model."""
_TABLE = """\
# invalid-tensor
an input has no name: give it one
    must specify 'name' | <PYTHON> <OUT> input { %s data_type: TYPE_FP32 dims: [ 2 ] }
    name: "" | name: "i"
input 'i' has no data_type: declare it
    model input 'i' must specify 'data_type' | <INPUT>
    dims: [ 2 ] | data_type: TYPE_FP32 dims: [ 2 ]
input 'i' has no dims: declare them, for instance `dims: [ -1 ]`
    model input 'i' must specify 'dims' | <INPUT>
    data_type: TYPE_FP32 | data_type: TYPE_FP32 dims: [ 2 ]
output 'p' has no dims: declare them, for instance `dims: [ -1 ]`
    model output 'p' must specify 'dims' | <MODEL> output { name: "p" data_type: TYPE_FP32 %s }
    - | dims: [ 1 ]
input 'i' has no dims: declare them, for instance `dims: [ -1 ]`
    model input 'i' must specify 'dims'
    platform: "ensemble" <STEPS> <OUT> input { name: "i" data_type: TYPE_FP32 %s }
    - | dims: [ -1 ]
input 'i' has an empty reshape and max_batch_size is 0: remove the reshape
    cannot have empty reshape for non-batching model
    <PYTHON> <OUT> input { name: "i" data_type: TYPE_FP32 dims: [ 1 ] reshape { } } max_batch_size: %s
    0 | 4
input 'i' has the reshape [0, 1]: each dimension must be 1 or more, or -1 for any size
    reshape dimensions must be integer >= 1 | <INPUT>
    data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ 0, 1 ] }
    data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ 1, 1 ] }
input 'i' has the dims [4] and the reshape [3]: write the same number of elements before, between and after the \
dimensions of -1
    model input 'i' has different size for dims and reshape | <INPUT>
    data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 3 ] }
    data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 1, 2 ] }
input 'i' has the dims [2, 4, -1, 6] and the reshape [4, -1, 6]: write the same number of elements before, between \
and after the dimensions of -1
    model input 'i' has different size for dims and reshape | <INPUT>
    data_type: TYPE_FP32 dims: [ 2, 4, -1, 6 ] reshape { shape: [ 4, -1, 6 ] }
    data_type: TYPE_FP32 dims: [ 2, 4, -1, 6 ] reshape { shape: [ 8, -1, 1, 6 ] }
input 'i' has the dims [-1, 2] and the reshape [-1, -1]: write the same number of elements before, between and \
after the dimensions of -1
    model input 'i' has different number of variable-size dimensions | <INPUT>
    data_type: TYPE_FP32 dims: [ -1, 2 ] reshape { shape: [ -1, -1 ] }
    data_type: TYPE_FP32 dims: [ -1, 2 ] reshape { shape: [ -1, 1, 2 ] }
input 'i' has the dims [2] and the reshape []: write the same number of elements before, between and after the \
dimensions of -1
    model input 'i' has different size for dims and reshape | <BATCHED_INPUT>
    data_type: TYPE_FP32 dims: [ 2 ] reshape { } | data_type: TYPE_FP32 dims: [ 1, 1 ] reshape { }
input 'i' has the format FORMAT_NCHW and not 3 dims: remove the format
    model input NHWC/NCHW require 3 dims | <INPUT>
    data_type: TYPE_FP32 dims: [ 3 ] format: FORMAT_NCHW
    data_type: TYPE_FP32 dims: [ 3, -1, -1 ] format: FORMAT_NCHW
input 'i' has is_shape_tensor, which only TensorRT knows: remove it
    shape tensors are only supported for TensorRT platform | <INPUT>
    data_type: TYPE_FP32 dims: [ 3 ] is_shape_tensor: true | data_type: TYPE_FP32 dims: [ 3 ] is_shape_tensor: false
input 'i' has is_non_linear_format_io, which only TensorRT knows, for 3 dims: remove it
    Non-linear IO format is only supported for the TensorRT platform | <INPUT>
    data_type: TYPE_FP32 dims: [ 3, 3, 3 ] is_non_linear_format_io: true | data_type: TYPE_FP32 dims: [ 3, 3, 3 ]
# invalid-batching
preferred_batch_size is 8: write sizes from 1 to max_batch_size, 4
    dynamic batching preferred size must be <= max batch size | <QUEUE>
    preferred_batch_size: [ 2, 8 ] | preferred_batch_size: [ 2, 4 ]
preferred_batch_size is 0: write sizes from 1 to max_batch_size, 4
    dynamic batching preferred size must be positive | <QUEUE>
    preferred_batch_size: [ 0 ] | -
preferred_batch_size is 2: write sizes from 1 to max_batch_size, 0
    dynamic batching preferred size must be <= max batch size | <MODEL> dynamic_batching { %s }
    preferred_batch_size: [ 2 ] | max_queue_delay_microseconds: 5
preferred_batch_size is 8: write sizes from 1 to max_batch_size, 4
    sequence batching preferred batch size must be <= max batch size | <BATCHED> sequence_batching { oldest { %s } }
    preferred_batch_size: [ 8 ] | preferred_batch_size: [ 4 ]
default_priority_level is 0: write a level from 1 to 2
    default priority level must be in range [1, 2] | <QUEUE>
    priority_levels: 2 | priority_levels: 2 default_priority_level: 2
priority_queue_policy has the level 3: write levels from 1 to 2
    priority queue policy must have priority level in range [1, 2]
    <BATCHED> dynamic_batching { priority_levels: 2 default_priority_level: 1 %s }
    priority_queue_policy { key: 3 value { max_queue_size: 1 } }
    priority_queue_policy { key: 2 value { max_queue_size: 1 } }
preserve_ordering does not work with 2 priority_levels: remove one of the two
    Only one priority level is allowed when 'preserve_ordering' is true
    <BATCHED> dynamic_batching { preserve_ordering: true default_priority_level: 1 %s }
    priority_levels: 2 | priority_levels: 1
preserve_ordering does not work with `timeout_action: DELAY`: remove one of the two
    Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true
    <BATCHED> dynamic_batching { default_queue_policy { <DELAY> } %s }
    preserve_ordering: true | -
preserve_ordering does not work with `timeout_action: DELAY`: remove one of the two
    Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true
    <BATCHED> dynamic_batching { preserve_ordering: true priority_levels: 1 default_priority_level: 1 \
priority_queue_policy { key: 1 value { %s } } }
    <DELAY> | timeout_action: DELAY
response_cache does not work with `decoupled: true`: remove it
    Response Cache does not currently support model
    <MODEL> response_cache { enable: true } model_transaction_policy { decoupled: %s }
    true | false
response_cache does not work with sequence_batching: remove it
    with sequence batching scheduler. Please disable the response cache.
    <MODEL> sequence_batching { } response_cache { enable: %s }
    true | false
batch_input has 2 times source_input: write it once
    batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 2
    <BATCH_INPUT> kind: BATCH_ELEMENT_COUNT data_type: TYPE_INT32 %s }
    source_input: [ "i", "i" ] | source_input: "i"
batch_input has the data_type TYPE_INT64: write TYPE_INT32 or TYPE_FP32
    batch input data type must be TYPE_INT32 or TYPE_FP32
    <BATCH_INPUT> kind: BATCH_ELEMENT_COUNT source_input: "i" data_type: %s }
    TYPE_INT64 | TYPE_FP32
batch_input has the source_input 'nope', which is not an input: correct the name
    unknown source input name 'nope'
    <BATCH_INPUT> kind: BATCH_ELEMENT_COUNT data_type: TYPE_INT32 source_input: %s }
    "nope" | "i"
batch_output has the source_input 'nope', which is not an input: correct the name
    unknown source input name 'nope'
    <BATCHED> batch_output { target_name: "o" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: %s }
    "nope" | "i"
batch_output has the target_name 'p': each must be an output, once
    unknown target output name 'p'
    <BATCHED> batch_output { source_input: "i" kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: %s }
    "p" | "o"
batch_output has the target_name 'o': each must be an output, once
    target output name 'o' can only be specified once
    <BATCHED> batch_output { source_input: "i" kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: %s }
    [ "o", "o" ] | "o"
# invalid-sequence
a control_input has no name: give it one
    sequence batching control tensor must have a name
    <BATCHED> sequence_batching { control_input { %s control { <START> } } }
    - | name: "S"
control_input has 'S' twice: write its controls into one
    sequence batching control tensor 'S' is specified for multiple control kinds
    <BATCHED> sequence_batching { control_input { name: "S" control { <START> } } control_input { name: "%s" \
control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } } }
    S | T
the control CONTROL_SEQUENCE_START is there twice: keep one
    sequence batching specifies multiple CONTROL_SEQUENCE_START tensors
    <BATCHED> sequence_batching { control_input { name: "S" control { <START> } } control_input { name: "T" control \
{ kind: CONTROL_SEQUENCE_%s int32_false_true: [ 0, 1 ] } } }
    START | READY
the control CONTROL_SEQUENCE_START of 'S' needs its two values, once: write for instance `int32_false_true: [ 0, 1 ]`
    must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' | <CONTROL>
    kind: CONTROL_SEQUENCE_START | <START>
the control CONTROL_SEQUENCE_START of 'S' needs its two values, once: write for instance `int32_false_true: [ 0, 1 ]`
    specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' | <CONTROL>
    <START> fp32_false_true: [ 0, 1 ] | kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ]
the control CONTROL_SEQUENCE_END of 'S' needs its two values, once: write for instance `int32_false_true: [ 0, 1 ]`
    sequence batching control 'bool_false_true' must have exactly 2 entries | <CONTROL>
    kind: CONTROL_SEQUENCE_END bool_false_true: [ true ] | kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ]
the control CONTROL_SEQUENCE_CORRID of 'S' takes a data_type and no values: remove them
    must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' | <CONTROL>
    kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 int32_false_true: [ 0, 1 ]
    kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64
the control CONTROL_SEQUENCE_CORRID of 'S' has the data_type TYPE_INVALID: write one of TYPE_UINT64, TYPE_INT64, \
TYPE_UINT32, TYPE_INT32, TYPE_STRING
    unexpected data type for control CONTROL_SEQUENCE_CORRID | <CONTROL>
    kind: CONTROL_SEQUENCE_CORRID | kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING
minimum_slot_utilization is 1.5: write a number from 0 to 1
    sequence batching minimum slot utilization must be in range
    <BATCHED> sequence_batching { direct { minimum_slot_utilization: %s } }
    1.5 | 1
the state 's' has 2 times initial_state: write it once
    must contain exactly one or zero element. Found '2' elements | <STATE>
    <FIRST> } initial_state { <FIRST> | <FIRST>
the state 's' has another data_type than its initial_state: write the same
    does not match the state data type | <STATE>
    name: "first" data_type: TYPE_FP64 dims: [ 2, 3 ] zero_data: true | <FIRST>
the state 's' has an initial_state without a name: give it one
    Field 'name' must be set when using initial_state | <STATE>
    data_type: TYPE_FP32 dims: [ 2, 3 ] zero_data: true | <FIRST>
the state 's' has the dims [2, -1] and the initial_state [2]: write its sizes, the same
    Number of dimensions in 'initial_state' doesn't match | <STATE>
    name: "first" data_type: TYPE_FP32 dims: [ 2 ] zero_data: true | <FIRST>
the state 's' has the dims [2, -1] and the initial_state [3, 3]: write its sizes, the same
    doesn't match 'state' dim description | <STATE>
    name: "first" data_type: TYPE_FP32 dims: [ 3, 3 ] zero_data: true | <FIRST>
the state 's' has the dims [2, -1] and the initial_state [2, -1]: write its sizes, the same
    contains variable dimensions | <STATE>
    name: "first" data_type: TYPE_FP32 dims: [ 2, -1 ] zero_data: true | <FIRST>
the state 's' has an initial_state without data: write `zero_data: true` or `data_file`
    to have state_data set | <STATE>
    name: "first" data_type: TYPE_FP32 dims: [ 2, 3 ] | <FIRST>
# invalid-ensemble
an ensemble has no backend: remove `backend: "python"`
    must have platform type 'ensemble' and empty backend type | <ENSEMBLE> <STEPS> %s
    <PYTHON> | -
ensemble_scheduling needs `platform: "ensemble"`: write it, without backend
    whose platform is not ensemble | <IN> <OUT> <STEPS> %s
    backend: "ensemble" | platform: "ensemble"
an ensemble has steps: write them in ensemble_scheduling
    ensemble scheduling must be set for ensemble | <ENSEMBLE> %s
    - | <STEPS>
an ensemble has no instance_group: remove it; the models of its steps may have one
    instance group should not be specified for ensemble | <ENSEMBLE> <STEPS> %s
    instance_group { kind: KIND_CPU } | -
an ensemble has no optimization: remove it; the models of its steps may have one
    optimization should not be specified for ensemble | <ENSEMBLE> <STEPS> %s
    optimization { } | -
an ensemble has no model_warmup: remove it; the models of its steps may have one
    model_warmup can not be specified for ensemble | <ENSEMBLE> <STEPS> %s
    model_warmup { name: "w" batch_size: 1 <DATA> } | -
ensemble_scheduling has no step: add one
    must specify 'step' for ensemble | <ENSEMBLE> ensemble_scheduling { %s }
    - | <STEP>
step 1 has no model_name: add it
    must specify 'model_name' in step 0 of ensemble
    <ENSEMBLE> ensemble_scheduling { step { model_version: -1 <IN_MAP> <OUT_MAP> %s } }
    - | model_name: "ident"
step 1 has no input_map: add it
    must specify 'input_map' in step 0 of ensemble
    <ENSEMBLE> ensemble_scheduling { step { model_name: "ident" model_version: -1 <OUT_MAP> %s } }
    - | <IN_MAP>
step 1 has no output_map: add it
    must specify 'output_map' in step 0 of ensemble
    <ENSEMBLE> ensemble_scheduling { step { model_name: "ident" model_version: -1 <IN_MAP> %s } }
    - | <OUT_MAP>
# invalid-setting
platform 'python' is not one of Triton's: write `backend: "python"` instead
    unexpected platform type 'python' | <IN> <OUT> %s
    platform: "python" | platform: "python" <PYTHON>
platform 'tensorrt_plan' does not belong to backend 'onnxruntime': remove platform
    unexpected 'platform' and 'backend' pair, got:tensorrt_plan, onnxruntime | <IN> <OUT> %s
    backend: "onnxruntime" platform: "tensorrt_plan" | <PYTHON>
an instance group of KIND_CPU has gpus: remove them, or write `kind: KIND_GPU`
    has kind KIND_CPU but specifies one or more GPUs | <GROUP>
    kind: KIND_CPU gpus: [ 0 ] | gpus: [ ] kind: KIND_CPU
an instance group of KIND_MODEL has gpus: remove them, or write `kind: KIND_GPU`
    has kind KIND_MODEL but specifies one or more GPUs | <GROUP>
    kind: KIND_MODEL gpus: [ 0 ] | kind: KIND_MODEL
an instance group has a profile, which only TensorRT knows: remove it
    specifies profile field which is only supported for TensorRT models | <GROUP>
    kind: KIND_CPU profile: "1" | kind: KIND_CPU profile: [ ]
the parameter FORCE_CPU_ONLY_INPUT_TENSORS is 'false': write yes or no
    Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: false
    <MODEL> parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "%s" } }
    false | no
the parameter TRITON_BATCH_STRATEGY_PATH does not work with sequence_batching: remove it
    TRITON_BATCH_STRATEGY_PATH cannot be specified with sequence batcher
    <MODEL> sequence_batching { } parameters { key: "%s" value { string_value: "/x.so" } }
    TRITON_BATCH_STRATEGY_PATH | OTHER_PATH
# invalid-warmup
model_warmup 'w', input 'i': has the dims [-1]: write the size of each
    warmup setting expects all variable-size dimensions are specified for input 'i' | <WARMUP>
    inputs { key: "i" value { data_type: TYPE_FP32 dims: [ -1 ] zero_data: true } } | <DATA>
model_warmup 'w', input 'i': has the dims [2, 2], and the model takes [-1]: write such dims
    unexpected shape for input 'i' | <WARMUP>
    inputs { key: "i" value { data_type: TYPE_FP32 dims: [ 2, 2 ] zero_data: true } } | <DATA>
model_warmup 'w', input 'i': has the data_type TYPE_FP64, and the model takes TYPE_FP32: write that
    inference input 'i' data-type is 'FP64', but model | <WARMUP>
    inputs { key: "i" value { data_type: TYPE_FP64 dims: [ 2 ] zero_data: true } } | <DATA>
model_warmup 'w', input 'i': has no data: write `zero_data: true`, `random_data: true` or `input_data_file`
    warmup setting expects input 'i' to have input_data_type set | <WARMUP>
    inputs { key: "i" value { data_type: TYPE_FP32 dims: [ 2 ] } }
    inputs { key: "i" value { data_type: TYPE_FP32 dims: [ 2 ] random_data: true } }
model_warmup 'w' has no input 'i', which the model requires: add it
    missing required input(s) ['i'] | <WARMUP>
    - | <DATA>
model_warmup 'w' has the batch_size 9: write 4 or less
    failed to run warmup sample 'w': batch size 9 | <BATCHED> model_warmup { name: "w" batch_size: %s <DATA> }
    9 | 4
# unknown-version
version_policy loads none of the versions 1: change it, or add the folder
    at least one version must be available under the version policy | <POLICY>
    specific { versions: [ 3 ] } | specific { versions: [ 3, 1 ] }
version_policy loads none of the versions 1: change it, or add the folder
    at least one version must be available under the version policy | <POLICY>
    latest { num_versions: 0 } | latest { num_versions: 1 }
# missing-file
label_filename is 'labels.txt', which is not in the model's folder: add it, or remove the line
    labels.txt: No such file or directory
    <PYTHON> <IN> output { name: "o" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" }%s
    - | -
input_data_file is 'warmup/data', which is not in the model's folder: add it, or remove the line
    warmup/data: No such file or directory | <WARMUP>
    inputs { key: "i" value { data_type: TYPE_FP32 dims: [ 2 ] input_data_file: "data" } }
    inputs { key: "i" value { data_type: TYPE_FP32 dims: [ 2 ] input_data_file: "data" } }
data_file is 'initial_state/data', which is not in the model's folder: add it, or remove the line
    initial_state/data: No such file or directory | <STATE>
    name: "first" data_type: TYPE_FP32 dims: [ 2, 3 ] data_file: "data"
    name: "first" data_type: TYPE_FP32 dims: [ 2, 3 ] data_file: "data"
EXECUTION_ENV_PATH is 'env.tar.gz', which is not in the model's folder: add it, or remove the line
    Failed to get the canonical path for
    <MODEL> parameters { key: "EXECUTION_ENV_PATH" value { string_value: "%s" } }
    $$TRITON_MODEL_DIRECTORY/env.tar.gz | -
"""
"""Code, text of the finding, and below it: Triton's text, the template, and what is broken and sound in it."""


def _parsed(table: str) -> Iterator[Refused]:
    for section in table.removeprefix("# ").split("\n# "):
        code, *rows = re.split(r"\n(?! )", section.strip())
        for row in rows:
            text, *fields = re.split(r"\n    | \| ", row)
            triton, template, broken, sound = [
                re.sub("<([A-Z_]+)>|^(-)$", lambda found: _TEXTS[found[1] or found[2]], field) for field in fields
            ]
            files = next((files for start, files in _FILES.items() if text.startswith(start)), {})
            yield Refused(code, text, triton, template, broken, sound, files=files)


REFUSED = list(_parsed(_TABLE))
"""One for each text of app/triton/refusals.py that a process of Triton can show."""
