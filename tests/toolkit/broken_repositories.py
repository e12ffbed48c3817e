"""Small broken model repositories, one for each finding of the linter."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SCRIPT = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"


@dataclass(frozen=True)
class Repository:
    """Writes models to ``path``. A tensor is ``NAME`` (FP32 of any length), ``NAME:INT64`` or ``NAME:FP32:4,2``."""

    path: Path

    def model(
        self, name: str, inputs: str, outputs: str, rest: str = "", *, batch: int = 0, script: str = SCRIPT
    ) -> None:
        tensors = [f"input {{ {_spec(each)} }}" for each in inputs.split()]
        tensors += [f"output {{ {_spec(each)} }}" for each in outputs.split()]
        self.write(
            name, "\n".join([f'name: "{name}"', f"max_batch_size: {batch}", 'backend: "python"', *tensors, rest])
        )
        (self.path / name / "1" / "model.py").write_text(script)

    def ensemble(self, name: str, inputs: str, outputs: str, *steps: str, batch: int = 0) -> None:
        """A step is ``model IN=tensor ... > OUT=tensor ...``."""
        tensors = [f"input {{ {_spec(each)} }}" for each in inputs.split()]
        tensors += [f"output {{ {_spec(each)} }}" for each in outputs.split()]
        scheduling = "\n".join(["ensemble_scheduling {", *map(_step, steps), "}"])
        head = [f'name: "{name}"', f"max_batch_size: {batch}", 'platform: "ensemble"']
        self.write(name, "\n".join([*head, *tensors, scheduling]))

    def write(self, name: str, config: str) -> None:
        (self.path / name / "1").mkdir(parents=True)
        (self.path / name / "config.pbtxt").write_text(config)


def _spec(text: str) -> str:
    name, datatype, dims, rest = [*text.split(":"), *["", "", ""]][:4]
    optional = " optional: true" if rest == "optional" else ""
    return f'name: "{name}" data_type: TYPE_{datatype or "FP32"} dims: [ {dims or "-1"} ]{optional}'


def _step(text: str) -> str:
    head, _, outputs = text.partition(">")
    model, *inputs = head.split()
    maps = [_map("input_map", each) for each in inputs] + [_map("output_map", each) for each in outputs.split()]
    return f'step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'


def _map(kind: str, text: str) -> str:
    key, value = text.split("=")
    return f'{kind} {{ key: "{key}" value: "{value}" }}'


def sound(repository: Repository) -> None:
    """Writes the valid models that every broken repository also contains."""
    repository.model("ident", "X", "Y")
    repository.model("join", "A B", "Y")
    repository.model("fork", "X", "P Q")
    repository.model("tokens", "X", "Y", DECOUPLED)
    repository.ensemble("sound", "X", "Y", "ident X=X > Y=t", "ident X=t > Y=Y")


def _unreadable(repository: Repository) -> None:
    repository.write("broken", 'name: "broken"\nbackend: "python"\ninputs [ ]')


def _folder_name(repository: Repository) -> None:
    repository.model("broken", "X", "Y")
    config = repository.path / "broken" / "config.pbtxt"
    config.write_text(config.read_text().replace('"broken"', '"borken"'))


def _invalid_size(repository: Repository) -> None:
    repository.model("broken", "X:FP32:-5,3", "Y")


def _excessive_size(repository: Repository) -> None:
    repository.model("broken", "X:FP32:9223372036854775807,-1", "Y")


def _unknown_version(repository: Repository) -> None:
    repository.ensemble("broken", "X", "Y", "ident X=X > Y=Y")
    config = repository.path / "broken" / "config.pbtxt"
    config.write_text(config.read_text().replace("model_version: -1", "model_version: 7"))


def _duplicate_key(repository: Repository) -> None:
    _steps("X", "Y", "fork X=X > P=p P=q", "join A=p B=q > Y=Y")(repository)


def _overwritten(repository: Repository) -> None:
    entries = [f'parameters {{ key: "limit" value {{ string_value: "{value}" }} }}' for value in (1, 2)]
    repository.model("broken", "X", "Y", "\n".join(entries))


def _refused(**replaced: str) -> Callable[[Repository], None]:
    """A model with one mistake that its configuration alone shows."""

    def build(repository: Repository) -> None:
        repository.model("broken", "X:FP32:4", "Y", replaced.get("rest", ""), batch=8)
        config = repository.path / "broken" / "config.pbtxt"
        text = config.read_text().replace("dims: [ 4 ]", replaced.get("dims", "dims: [ 4 ]"))
        config.write_text(text.replace("dims: [ -1 ]", f"dims: [ -1 ] {replaced.get('output', '')}"))

    return build


def _ensemble_with_instances(repository: Repository) -> None:
    _steps("X", "Y", "ident X=X > Y=Y")(repository)
    config = repository.path / "broken" / "config.pbtxt"
    config.write_text(config.read_text() + "\ninstance_group { kind: KIND_CPU }")


def _datatype(repository: Repository) -> None:
    repository.model("whole", "X:INT64", "Y:INT64")
    repository.ensemble("broken", "X", "Y:INT64", "ident X=X > Y=t", "whole X=t > Y=Y")


def _shape(repository: Repository) -> None:
    repository.model("pairs", "X:FP32:-1,2", "Y:FP32:-1,2")
    repository.ensemble("broken", "X", "Y:FP32:-1,2", "ident X=X > Y=t", "pairs X=t > Y=Y")


def _batch(repository: Repository) -> None:
    repository.model("pair_at_most", "X", "Y", batch=2)
    repository.ensemble("broken", "X", "Y", "pair_at_most X=X > Y=Y", batch=4)


def _omitted(repository: Repository) -> None:
    repository.model("shy", "X", "Y", 'parameters { key: "may_omit" value { string_value: "Y" } }')
    repository.ensemble("broken", "X", "Y", "shy X=X > Y=t", "ident X=t > Y=Y")


def _bls_cycle(repository: Repository) -> None:
    repository.model("broken", "X", "Y")
    script = repository.path / "broken" / "1" / "model.py"
    script.write_text(
        SCRIPT + '\n\ndef again(x):\n    return pb_utils.InferenceRequest(model_name="broken", inputs=[x])\n'
    )


def _cancel(repository: Repository) -> None:
    two = "instance_group [ { kind: KIND_CPU count: 2 } ]"
    repository.model("broken", "X STOP:STRING:1:optional", "Y", f"{DECOUPLED}\n{two}")


def _router(repository: Repository) -> None:
    on_gpu = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'
    repository.model("head", "X", "Y", on_gpu)
    repository.ensemble(
        "broken", "X", "Y Z", "ident X=X > Y=features", "head X=features > Y=Y", "ident X=features > Y=Z"
    )


def _unordered(repository: Repository) -> None:
    repository.model("post", "X", "Y", "instance_group [ { kind: KIND_CPU count: 4 } ]")
    repository.ensemble("broken", "X", "Y", "tokens X=X > Y=t", "post X=t > Y=Y")


def _auto(repository: Repository) -> None:
    repository.write("auto", 'name: "auto"\nbackend: "python"')
    (repository.path / "auto" / "1" / "model.py").write_text(SCRIPT)
    repository.ensemble("broken", "X", "Y", "auto X=X > Y=t", "ident X=t > Y=Y")


def _missing_script(repository: Repository) -> None:
    repository.model("broken", "X", "Y")
    (repository.path / "broken" / "1" / "model.py").unlink()


def _syntax(repository: Repository) -> None:
    repository.model("broken", "X", "Y", script=SCRIPT.replace("requests):", "requests)"))


def _backend(repository: Repository) -> None:
    repository.model("broken", "X", "Y")
    config = repository.path / "broken" / "config.pbtxt"
    config.write_text(config.read_text().replace('"python"', '"pyton"'))


def _parallel(repository: Repository) -> None:
    repository.model("strict", "X", "Y", script=SCRIPT.replace("return", "raise ValueError(requests) or"))
    repository.ensemble("broken", "X", "Y Z", "strict X=X > Y=Y", "ident X=X > Y=Z")


def _steps(inputs: str, outputs: str, *steps: str) -> Callable[[Repository], None]:
    return lambda repository: repository.ensemble("broken", inputs, outputs, *steps)


@dataclass(frozen=True)
class Broken:
    """A broken repository. ``refused`` means that Triton does not load it."""

    build: Callable[[Repository], None]
    refused: bool
    gateway: str = ""

    def write(self, path: Path) -> Path | None:
        """Writes the repository to ``path``. Returns the path of gateway.yaml, or None without one."""
        repository = Repository(path / "models")
        sound(repository)
        self.build(repository)
        if not self.gateway:
            return None
        (path / "gateway.yaml").write_text(self.gateway)
        return path / "gateway.yaml"


def _sequence(repository: Repository) -> None:
    control = 'name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT32 }'
    repository.model("broken", "X", "Y", f"sequence_batching {{ control_input {{ {control} }} }}")


def _summing(name: str, *, idle_s: int = 1) -> Callable[[Repository], None]:
    """A model with the direct scheduler and four sequences at a time."""
    batching = f"sequence_batching {{ max_sequence_idle_microseconds: {idle_s * 1_000_000} }}"
    return lambda repository: repository.model(name, "X:FP32:1", "Y:FP32:1", batching, batch=4)


def _two_states(repository: Repository) -> None:
    for name in ("first", "second"):
        _summing(name, idle_s=60)(repository)
    repository.model("between", "X:FP32:1", "Y:FP32:1", batch=4)
    steps = ("first X=X > Y=a", "between X=a > Y=b", "second X=b > Y=Y")
    repository.ensemble("broken", "X:FP32:1", "Y:FP32:1", *steps, batch=4)


FLAG = "BOOL:1:optional"
VLLM = f"text_input:STRING:1 stream:{FLAG} sampling_parameters:STRING:1:optional exclude_input_in_output:{FLAG}"
VLLM_COUNTS = f"return_logprobs:{FLAG} return_num_input_tokens:{FLAG} return_num_output_tokens:{FLAG}"


def _preset(repository: Repository) -> None:
    """A vLLM backend that does not tell the finish reason."""
    outputs = "text_output:STRING logprobs:STRING num_input_tokens:UINT32:1 num_output_tokens:UINT32"
    repository.model("broken", f"{VLLM} {VLLM_COUNTS}", outputs, DECOUPLED)


def _not_decoupled(repository: Repository) -> None:
    numbers = ("max_tokens:INT32", "temperature", "top_p", "top_k:INT32", "seed:UINT64")
    numbers += ("presence_penalty", "frequency_penalty")
    inputs = [f"sampling_param_{each if ':' in each else f'{each}:FP32'}:1:optional" for each in numbers]
    inputs += [f"{name}:{FLAG}" for name in ("streaming", "return_finish_reason")]
    inputs += [f"sampling_param_exclude_input_from_output:{FLAG}", "sampling_param_stop:STRING:-1:optional"]
    repository.model("broken", " ".join(["text_input:STRING", *inputs]), "text_output:STRING finish_reason:STRING")


def engine(name: str, *, accumulate_tokens: str = "", decoupled: bool = True) -> Callable[[Repository], None]:
    """TensorRT-LLM's ``tensorrt_llm_bls``."""
    numbers = ("min_tokens:INT32", "temperature", "top_p", "top_k:INT32", "seed:UINT64", "presence_penalty")
    numbers += ("frequency_penalty", "repetition_penalty", "length_penalty")
    inputs = ["text_input:STRING:1", "max_tokens:INT32:1"]
    inputs += [f"{each if ':' in each else f'{each}:FP32'}:1:optional" for each in numbers]
    inputs += [f"{each}:STRING:-1:optional" for each in ("stop_words", "bad_words")]
    inputs += [f"guided_decoding_guide{each}:STRING:1:optional" for each in ("", "_type")]
    flags = ("stream", "exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens")
    inputs += [f"{each}:{FLAG}" for each in flags]
    rest = DECOUPLED if decoupled else ""
    if accumulate_tokens:
        rest += f' parameters {{ key: "accumulate_tokens" value {{ string_value: "{accumulate_tokens}" }} }}'
    outputs = "text_output:STRING num_input_tokens:INT32:1 num_output_tokens:INT32:1"
    return lambda repository: repository.model(name, " ".join(inputs), outputs, rest, batch=4)


def _no_health_check(repository: Repository) -> None:
    repository.write("broken", 'name: "broken"\nbackend: "vllm"')
    (repository.path / "broken" / "1" / "model.json").write_text("{}")


BROKEN = {
    "unreadable-config": Broken(_unreadable, refused=True),
    "duplicate-key": Broken(_duplicate_key, refused=True),
    "overwritten-value": Broken(_overwritten, refused=False),
    "missing-file": Broken(_refused(output='label_filename: "labels.txt"'), refused=True),
    "invalid-tensor": Broken(_refused(dims="dims: [ 4 ] reshape { shape: [ 3 ] }"), refused=True),
    "invalid-batching": Broken(_refused(rest="dynamic_batching { preferred_batch_size: [ 16 ] }"), refused=True),
    "invalid-sequence": Broken(
        _refused(
            rest='sequence_batching { iterative_sequence: true control_input { name: "S" control { kind: '
            "CONTROL_SEQUENCE_START } } }"
        ),
        refused=True,
    ),
    "invalid-ensemble": Broken(_ensemble_with_instances, refused=True),
    "invalid-setting": Broken(_refused(rest="instance_group { kind: KIND_CPU gpus: [ 0 ] }"), refused=True),
    "invalid-warmup": Broken(_refused(rest='model_warmup { name: "zeros" batch_size: 1 }'), refused=True),
    "folder-name": Broken(_folder_name, refused=True),
    "invalid-size": Broken(_invalid_size, refused=True),
    "excessive-size": Broken(_excessive_size, refused=False),
    "unknown-model": Broken(_steps("X", "Y", "idnet X=X > Y=Y"), refused=True),
    "unknown-version": Broken(_unknown_version, refused=True),
    "unknown-tensor": Broken(_steps("X", "Y", "ident X=X > Z=Y"), refused=True),
    "unmapped-input": Broken(_steps("X", "Y", "join A=X > Y=Y"), refused=True),
    "unwritten-tensor": Broken(_steps("X", "Y", "ident X=X > Y=mid", "join A=mid B=mit > Y=Y"), refused=True),
    "unread-tensor": Broken(_steps("X", "Y", "fork X=X > P=Y Q=rest"), refused=True),
    "written-twice": Broken(_steps("X", "Y", "ident X=X > Y=Y", "ident X=X > Y=Y"), refused=True),
    "cycle": Broken(_steps("X", "Y", "join A=X B=b > Y=a", "fork X=a > P=b Q=Y"), refused=True),
    "datatype-mismatch": Broken(_datatype, refused=True),
    "shape-mismatch": Broken(_shape, refused=True),
    "batch-mismatch": Broken(_batch, refused=True),
    "decoupled-join": Broken(_steps("X", "Y", "tokens X=X > Y=t", "join A=t B=X > Y=Y"), refused=True),
    "omitted-input": Broken(_omitted, refused=False),
    "bls-cycle": Broken(_bls_cycle, refused=False),
    "cancel-instances": Broken(
        _cancel, refused=False, gateway="pipelines: {write: {model: broken, cancel: {model: broken, input: STOP}}}\n"
    ),
    "gateway-yaml": Broken(
        _steps("X", "Y", "ident X=X > Y=Y"),
        refused=False,
        gateway="pipelines:\n  broken:\n    model: broken\n    outputs: {answer: {tensor: YY}}\n",
    ),
    "router-needed": Broken(_router, refused=False),
    "unordered-stream": Broken(_unordered, refused=False),
    "missing-script": Broken(_missing_script, refused=True),
    "script-syntax": Broken(_syntax, refused=True),
    "unknown-backend": Broken(_backend, refused=True),
    "parallel-failure": Broken(_parallel, refused=False),
    "sample": Broken(
        _steps("X", "Y", "ident X=X > Y=Y"),
        refused=False,
        gateway="pipelines:\n  broken:\n    model: broken\n    sample:\n      x: [1.0]\n",
    ),
    "needs-session": Broken(_sequence, refused=False),
    "session-idle": Broken(
        _summing("broken"), refused=False, gateway="pipelines: {talk: {model: broken, session: true}}\n"
    ),
    "session-places": Broken(
        _summing("broken", idle_s=60),
        refused=False,
        gateway="pipelines: {talk: {model: broken, session: {max_open: 10}}}\n",
    ),
    "session-state": Broken(_two_states, refused=False, gateway="pipelines: {talk: {model: broken, session: true}}\n"),
    "preset-mismatch": Broken(_preset, refused=False),
    "not-decoupled": Broken(_not_decoupled, refused=False),
    "split-characters": Broken(engine("broken"), refused=False),
    "no-health-check": Broken(_no_health_check, refused=False),
    "special-tokens": Broken(
        lambda repository: repository.model("broken", "PROMPT:STRING:1", "TEXT:STRING:1"),
        refused=False,
        gateway="""
pipelines:
  chat:
    model: broken
    inputs: {prompt: {tensor: PROMPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    openai: {chat: {template_text: "{{ messages[0].content }}"}, tools: mistral}
""",
    ),
    "batches-of-one": Broken(
        lambda repository: repository.model("broken", "X", "Y", batch=8),
        refused=False,
        gateway="pipelines: {score: {model: broken}}\n",
    ),
    "unknown-edge": Broken(_auto, refused=False),
}
