"""The reasons for which Triton refuses to load a model, as far as the model's folder tells them.

Sources: ``model_config_utils.cc``, ``backend_model_instance.cc`` and ``sequence_batch_scheduler.cc`` of Triton's core.
tests/toolkit/refused_configurations.py has a configuration and Triton's message for each text.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import Message
from tritonclient.grpc import model_config_pb2 as pb

from app.core.model import Finding
from app.triton.model_folder import BACKEND_BY_PLATFORM, ModelFolder


def refusals(model: ModelFolder) -> Iterator[Finding]:
    """Each reason with what to do. One text stands once, however often it applies."""
    for code, texts_of in RULES:
        for text in dict.fromkeys(texts_of(model)):
            step = re.match(r"step (\d+) ", text)
            default = "overwritten-value" if step is None else "duplicate-key"
            yield Finding(code or default, text, model.path.name, int(step[1]) if step else None)


_ANY = -1


def _tensors(model: ModelFolder) -> Iterator[str]:
    config, is_tensorrt = model.config, model.backend == "tensorrt"
    for name in _twice(each.name for each in config.input if each.name):
        yield f"input '{name}' is declared twice, and each request fails: remove one"
    for io, each in [*(("input", each) for each in config.input), *(("output", each) for each in config.output)]:
        name, dims, shape = f"{io} '{each.name}'", each.dims, each.reshape.shape
        if not each.name:
            yield f"an {io} has no name: give it one"
        if not each.data_type and not model.completes:
            yield f"{name} has no data_type: declare it"
        if not dims and not model.completes:
            yield f"{name} has no dims: declare them, for instance `dims: [ -1 ]`"
        if any(dim < 1 and dim != _ANY for dim in shape):
            yield f"{name} has the reshape {shape}: each dimension must be 1 or more, or -1 for any size"
        elif each.HasField("reshape") and not shape and not config.max_batch_size and not model.completes:
            yield f"{name} has an empty reshape and max_batch_size is 0: remove the reshape"
        elif each.HasField("reshape") and dims and _parts(dims) != _parts(shape):
            yield (
                f"{name} has the dims {dims} and the reshape {shape}: write the same number of elements before, "
                "between and after the dimensions of -1"
            )
        if io == "input" and each.format and dims and len(dims) != 3:
            yield f"{name} has the format {each.Format.Name(each.format)} and not 3 dims: remove the format"
        if each.is_shape_tensor and not is_tensorrt:
            yield f"{name} has is_shape_tensor, which only TensorRT knows: remove it"
        if each.is_non_linear_format_io and not (is_tensorrt and len(dims) in (0, 3)):
            yield f"{name} has is_non_linear_format_io, which only TensorRT knows, for 3 dims: remove it"


def _parts(dims: Sequence[int]) -> list[int]:
    """The numbers of elements before, between and after the dimensions of any size."""
    ends = [-1, *(index for index, dim in enumerate(dims) if dim == _ANY), len(dims)]
    return [math.prod(dims[start + 1 : end]) for start, end in pairwise(ends)]


def _batching(model: ModelFolder) -> Iterator[str]:
    config, batching = model.config, model.config.dynamic_batching
    for size in [*batching.preferred_batch_size, *config.sequence_batching.oldest.preferred_batch_size]:
        if not 0 < size <= config.max_batch_size:
            yield f"preferred_batch_size is {size}: write sizes from 1 to max_batch_size, {config.max_batch_size}"
    if levels := batching.priority_levels:
        if not 1 <= batching.default_priority_level <= levels:
            yield f"default_priority_level is {batching.default_priority_level}: write a level from 1 to {levels}"
        for level in batching.priority_queue_policy:
            if not 1 <= level <= levels:
                yield f"priority_queue_policy has the level {level}: write levels from 1 to {levels}"
    if batching.preserve_ordering and levels > 1:
        yield f"preserve_ordering does not work with {levels} priority_levels: remove one of the two"
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    delays = any(each.default_timeout_microseconds and each.timeout_action == each.DELAY for each in policies)
    if batching.preserve_ordering and delays:
        yield "preserve_ordering does not work with `timeout_action: DELAY`: remove one of the two"
    if config.response_cache.enable:
        for is_there, what in (
            (config.model_transaction_policy.decoupled, "`decoupled: true`"),
            (config.HasField("sequence_batching"), "sequence_batching"),
        ):
            if is_there:
                yield f"response_cache does not work with {what}: remove it"


def _batch_tensors(model: ModelFolder) -> Iterator[str]:
    config = model.config
    inputs, outputs = ({each.name for each in tensors} for tensors in (config.input, config.output))
    for kind, entry in [
        *(("batch_input", x) for x in config.batch_input),
        *(("batch_output", x) for x in config.batch_output),
    ]:
        if len(entry.source_input) != 1:
            yield f"{kind} has {len(entry.source_input)} times source_input: write it once"
        for name in set(entry.source_input) - inputs if not model.completes else ():
            yield f"{kind} has the source_input '{name}', which is not an input: correct the name"
        if kind == "batch_input" and entry.data_type not in (pb.TYPE_INT32, pb.TYPE_FP32):
            yield f"{kind} has the data_type {_type(entry)}: write TYPE_INT32 or TYPE_FP32"
        for name, count in Counter(entry.target_name).items() if kind == "batch_output" else ():
            if count > 1 or (name not in outputs and not model.completes):
                yield f"{kind} has the target_name '{name}': each must be an output, once"


def _sequences(model: ModelFolder) -> Iterator[str]:
    batching = model.config.sequence_batching
    controls = [(tensor.name, each) for tensor in batching.control_input for each in tensor.control]
    for tensor in batching.control_input:
        if not tensor.name:
            yield "a control_input has no name: give it one"
    for name in _twice(each.name for each in batching.control_input):
        yield f"control_input has '{name}' twice: write its controls into one"
    for kind in _twice(each.Kind.Name(each.kind) for _, each in controls):
        yield f"the control {kind} is there twice: keep one"
    for name, each in controls:
        control = f"the control {each.Kind.Name(each.kind)} of '{name}'"
        values = [len(x) for x in (each.int32_false_true, each.fp32_false_true, each.bool_false_true) if x]
        if each.kind != each.CONTROL_SEQUENCE_CORRID and values != [2]:
            yield f"{control} needs its two values, once: write for instance `int32_false_true: [ 0, 1 ]`"
        elif each.kind == each.CONTROL_SEQUENCE_CORRID and values:
            yield f"{control} takes a data_type and no values: remove them"
        elif each.kind == each.CONTROL_SEQUENCE_CORRID and each.data_type not in _ID_TYPES:
            types = ", ".join(map(pb.DataType.Name, _ID_TYPES))
            yield f"{control} has the data_type {_type(each)}: write one of {types}"
    if not 0 <= batching.direct.minimum_slot_utilization <= 1:
        yield f"minimum_slot_utilization is {batching.direct.minimum_slot_utilization:g}: write a number from 0 to 1"


def _states(model: ModelFolder) -> Iterator[str]:
    for state in model.config.sequence_batching.state:
        name = f"the state '{state.input_name}'"
        if len(state.initial_state) > 1:
            yield f"{name} has {len(state.initial_state)} times initial_state: write it once"
        for first in state.initial_state[:1]:
            if first.data_type != state.data_type:
                yield f"{name} has another data_type than its initial_state: write the same"
            if not first.name:
                yield f"{name} has an initial_state without a name: give it one"
            if not _fits(first.dims, state.dims):
                yield f"{name} has the dims {state.dims} and the initial_state {first.dims}: write its sizes, the same"
            if first.WhichOneof("state_data") is None:
                yield f"{name} has an initial_state without data: write `zero_data: true` or `data_file`"


_ID_TYPES = (pb.TYPE_UINT64, pb.TYPE_INT64, pb.TYPE_UINT32, pb.TYPE_INT32, pb.TYPE_STRING)


def _ensembles(model: ModelFolder) -> Iterator[str]:
    config, is_scheduled = model.config, model.config.HasField("ensemble_scheduling")
    if config.platform == "ensemble" and config.backend:
        yield f'an ensemble has no backend: remove `backend: "{config.backend}"`'
    elif config.platform == "ensemble" and not is_scheduled:
        yield "an ensemble has steps: write them in ensemble_scheduling"
    if not is_scheduled:
        return
    if config.platform != "ensemble":
        yield 'ensemble_scheduling needs `platform: "ensemble"`: write it, without backend'
    for field, _ in config.ListFields():
        if field.name in ("instance_group", "optimization", "model_warmup"):
            yield f"an ensemble has no {field.name}: remove it; the models of its steps may have one"
    if not config.ensemble_scheduling.step:
        yield "ensemble_scheduling has no step: add one"
    for number, step in enumerate(config.ensemble_scheduling.step, 1):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                yield f"step {number} has no {field}: add it"


def _settings(model: ModelFolder) -> Iterator[str]:
    config, backend = model.config, model.config.backend
    if model.versions and not config.platform and not model.backend:
        yield "config.pbtxt names no backend, and no file such as 1/model.py tells which one it is: write `backend`"
    if config.platform and not model.backend:
        yield f"platform '{config.platform}' is not one of Triton's: write `backend: \"{config.platform}\"` instead"
    owner = BACKEND_BY_PLATFORM.get(config.platform)
    if config.platform and backend in set(BACKEND_BY_PLATFORM.values()) - {owner} and owner != "torch_aoti":
        yield f"platform '{config.platform}' does not belong to backend '{backend}': remove platform"
    for group in config.instance_group if model.backend != "ensemble" else ():
        if group.kind in (group.KIND_CPU, group.KIND_MODEL) and group.gpus:
            yield f"an instance group of {group.Kind.Name(group.kind)} has gpus: remove them, or write `kind: KIND_GPU`"
        if group.profile and model.backend != "tensorrt":
            yield "an instance group has a profile, which only TensorRT knows: remove it"
    if model.backend == "python" and _parameter(model, _FORCE_CPU) not in ("", "yes", "no"):
        yield f"the parameter {_FORCE_CPU} is '{_parameter(model, _FORCE_CPU)}': write yes or no"
    if config.HasField("sequence_batching") and "TRITON_BATCH_STRATEGY_PATH" in config.parameters:
        yield "the parameter TRITON_BATCH_STRATEGY_PATH does not work with sequence_batching: remove it"


_FORCE_CPU = "FORCE_CPU_ONLY_INPUT_TENSORS"


def _warmups(model: ModelFolder) -> Iterator[str]:
    inputs = {each.name: each for each in model.config.input}
    largest = max(model.config.max_batch_size, 1)
    for sample in model.config.model_warmup if model.backend != "ensemble" else ():
        if model.backend == "python" and sample.batch_size > largest:
            yield f"model_warmup '{sample.name}' has the batch_size {sample.batch_size}: write {largest} or less"
        for name, data in sample.inputs.items() if sample.batch_size else ():
            place, declared = f"model_warmup '{sample.name}', input '{name}'", inputs.get(name)
            if _ANY in data.dims:
                yield f"{place}: has the dims {data.dims}: write the size of each"
            elif declared and declared.dims and not _fits(data.dims, declared.dims):
                yield f"{place}: has the dims {data.dims}, and the model takes {declared.dims}: write such dims"
            if declared and declared.data_type not in (pb.TYPE_INVALID, data.data_type):
                yield f"{place}: has the data_type {_type(data)}, and the model takes {_type(declared)}: write that"
            if data.WhichOneof("input_data_type") is None:
                yield f"{place}: has no data: write `zero_data: true`, `random_data: true` or `input_data_file`"
        for name, each in inputs.items() if sample.batch_size and not model.completes else ():
            if not each.optional and name not in sample.inputs:
                yield f"model_warmup '{sample.name}' has no input '{name}', which the model requires: add it"


def _files(model: ModelFolder) -> Iterator[str]:
    config = model.config
    named = [("label_filename", each.label_filename) for each in config.output if each.label_filename]
    data = [each for sample in config.model_warmup for each in sample.inputs.values() if sample.batch_size]
    named += [("input_data_file", f"warmup/{each.input_data_file}") for each in data if each.input_data_file]
    states = [each for state in config.sequence_batching.state for each in state.initial_state]
    named += [("data_file", f"initial_state/{each.data_file}") for each in states if each.data_file]
    environment = _parameter(model, "EXECUTION_ENV_PATH")
    if environment.startswith(_OWN_FOLDER):
        named.append(("EXECUTION_ENV_PATH", environment.removeprefix(_OWN_FOLDER).lstrip("/")))
    for field, path in named:
        if not os.path.exists(model.path / path):  # noqa: PTH110 - Path.exists raises OSError for a name too long
            yield f"{field} is '{path}', which is not in the model's folder: add it, or remove the line"
    for each in data:
        size = math.prod(each.dims) * _BYTES.get(each.data_type, 0)
        path = model.path / "warmup" / each.input_data_file
        if each.input_data_file and path.is_file() and path.stat().st_size < size:
            yield f"'warmup/{each.input_data_file}' has {path.stat().st_size} bytes: the dims need {size}"


_OWN_FOLDER = "$$TRITON_MODEL_DIRECTORY"
_BYTES = {
    **dict.fromkeys([pb.TYPE_BOOL, pb.TYPE_INT8, pb.TYPE_UINT8], 1),
    **dict.fromkeys([pb.TYPE_INT16, pb.TYPE_UINT16, pb.TYPE_FP16, pb.TYPE_BF16], 2),
    **dict.fromkeys([pb.TYPE_INT32, pb.TYPE_UINT32, pb.TYPE_FP32], 4),
    **dict.fromkeys([pb.TYPE_INT64, pb.TYPE_UINT64, pb.TYPE_FP64], 8),
}


def _parameter(model: ModelFolder, name: str) -> str:
    return model.config.parameters[name].string_value if name in model.config.parameters else ""


def _versions(model: ModelFolder) -> Iterator[str]:
    if not model.versions and model.config == pb.ModelConfig():
        yield "the folder has no config.pbtxt and no version, and Triton loads each folder: move it elsewhere"
    elif not model.versions:
        yield "the model has no version folder: add a folder such as 1"
    elif not model.loaded:
        yield f"version_policy loads none of the versions {', '.join(model.versions)}: change it, or add the folder"


def unusable_names(model: ModelFolder) -> Iterator[str]:
    """Triton 2.51 starts the process of an instance by a command of a shell without quotes; 2.61 and newer do not."""
    config = model.config
    named = [("the folder", model.path.name), ("default_model_filename", config.default_model_filename)]
    for what, name in [*named, *(("an instance group", each.name) for each in config.instance_group)]:
        if model.backend in ("python", "vllm") and _NO_WORD.search(name):
            yield f"{what} is '{name}', and Triton 2.51 never loads such a model: use letters, digits, '_', '-' and '.'"


_NO_WORD = re.compile(r"""[\s;|&$`<>()\\"']|^#|\{.*,""")


def _repeats(model: ModelFolder) -> Iterator[str]:
    """The keys that a map has several times with different values."""
    steps = model.config.ensemble_scheduling.step
    waiting: list[tuple[int, Any]] = [(0, text_format.Parse(model.text, _with_entries()()))]
    for step, message in waiting:  # the step of the ensemble, from 1; 0 elsewhere
        for field, value in message.ListFields():
            entries: dict[str, list[str]] = {}
            for number, each in enumerate(value if isinstance(value, Sequence) else [value], 1):
                if field.message_type is not None:
                    waiting.append((number if field.name == "step" else step, each))
                if field.message_type is not None and field.message_type.name.endswith("Entry"):
                    shown = str(getattr(each.value, "string_value", each.value))
                    entries.setdefault(str(each.key), []).append(f"'{' '.join(shown.split())}'")
            place = f"step {step} ('{steps[step - 1].model_name}'): {field.name}" if step else field.name
            for key, values in entries.items():
                if len(set(values)) > 1:
                    yield (
                        f"{place} has the key '{key}' twice; Triton uses only the last, {values[-1]}: correct or "
                        "remove one"
                    )


@cache
def _with_entries() -> type[Message]:
    """ModelConfig with maps as repeated entries, which keep what a later entry with the same key overwrites."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    waiting = list(file.message_type)
    for message in waiting:
        message.options.ClearField("map_entry")
        waiting += message.nested_type
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))


_NO_SCRIPT = "does not exist: the Python backend needs this script in each version"
RULES = (
    ("", _repeats),
    ("folder-name", unusable_names),
    ("unknown-version", _versions),
    ("missing-file", _files),
    ("invalid-tensor", _tensors),
    ("invalid-batching", _batching),
    ("invalid-batching", _batch_tensors),
    ("invalid-sequence", _sequences),
    ("invalid-sequence", _states),
    ("invalid-ensemble", _ensembles),
    ("invalid-setting", _settings),
    ("invalid-warmup", _warmups),
    ("missing-script", lambda model: (f"{path} {_NO_SCRIPT}" for path in model.missing_scripts)),
    ("script-syntax", lambda model: model.scripts.mistakes if model.loaded else ()),
)


def _twice(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _type(each: Any) -> str:
    return str(pb.DataType.Name(each.data_type))


def _fits(dims: Sequence[int], declared: Sequence[int]) -> bool:
    """Whether fixed dims agree with declared ones, where -1 is any size."""
    both = zip(dims, declared, strict=False)
    return len(dims) == len(declared) and _ANY not in dims and all(b in (_ANY, a) for a, b in both)
