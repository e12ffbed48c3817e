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
        self.write(name, "\n".join([*_head(name, batch, inputs, outputs), 'backend: "python"', rest]))
        (self.path / name / "1" / "model.py").write_text(script)

    def ensemble(self, name: str, inputs: str, outputs: str, *steps: str, batch: int = 0) -> None:
        """A step is ``model IN=tensor ... > OUT=tensor ...``."""
        scheduling = ['platform: "ensemble"', "ensemble_scheduling {", *map(_step, steps), "}"]
        self.write(name, "\n".join([*_head(name, batch, inputs, outputs), *scheduling]))

    def write(self, name: str, config: str) -> None:
        (self.path / name / "1").mkdir(parents=True)
        (self.path / name / "config.pbtxt").write_text(config)


def _head(name: str, batch: int, inputs: str, outputs: str) -> list[str]:
    tensors = [f"input {{ {_spec(each)} }}" for each in inputs.split()]
    tensors += [f"output {{ {_spec(each)} }}" for each in outputs.split()]
    return [f'name: "{name}"', f"max_batch_size: {batch}", *tensors]


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


Build = Callable[[Repository], None]


def _all(*builds: Build) -> Build:
    def build(repository: Repository) -> None:
        for each in builds:
            each(repository)

    return build


def _model(name: str, inputs: str, outputs: str, rest: str = "", *, batch: int = 0, script: str = SCRIPT) -> Build:
    return lambda repository: repository.model(name, inputs, outputs, rest, batch=batch, script=script)


def _steps(inputs: str, outputs: str, *steps: str, batch: int = 0) -> Build:
    return lambda repository: repository.ensemble("broken", inputs, outputs, *steps, batch=batch)


def _written(config: str, **files: str) -> Build:
    """A model of the name in its configuration, with files in its version folder instead of a script."""
    name = config.split('"')[1]

    def build(repository: Repository) -> None:
        repository.write(name, config)
        for path, text in files.items():
            (repository.path / name / "1" / path.replace("_", ".")).write_text(text)

    return build


def _edited(build: Build, old: str, new: str) -> Build:
    """Replaces a text of the configuration of ``broken``."""

    def edit(repository: Repository) -> None:
        build(repository)
        config = repository.path / "broken" / "config.pbtxt"
        config.write_text(config.read_text().replace(old, new))

    return edit


def _missing_script(repository: Repository) -> None:
    PLAIN(repository)
    (repository.path / "broken" / "1" / "model.py").unlink()


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def _summing(name: str, *, idle_s: int = 1) -> Build:
    """A model with the direct scheduler and four sequences at a time."""
    batching = f"sequence_batching {{ max_sequence_idle_microseconds: {idle_s * 1_000_000} }}"
    return _model(name, "X:FP32:1", "Y:FP32:1", batching, batch=4)


PLAIN = _model("broken", "X", "Y")
ENSEMBLE = _steps("X", "Y", "ident X=X > Y=Y")
OF_FOUR = _model("broken", "X:FP32:4", "Y", batch=8)
AGAIN = '\n\ndef again(x):\n    return pb_utils.InferenceRequest(model_name="broken", inputs=[x])\n'
CONTROL = 'control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT32 } }'
UNCLEAR = """sequence_batching {
  iterative_sequence: true control_input { name: "S" control { kind: CONTROL_SEQUENCE_START } }
}"""
FLAG = "BOOL:1:optional"
VLLM = f"text_input:STRING:1 stream:{FLAG} sampling_parameters:STRING:1:optional exclude_input_in_output:{FLAG}"
VLLM_COUNTS = f"return_logprobs:{FLAG} return_num_input_tokens:{FLAG} return_num_output_tokens:{FLAG}"
WITHOUT_FINISH_REASON = "text_output:STRING logprobs:STRING num_input_tokens:UINT32:1 num_output_tokens:UINT32"


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
        rest += f" {parameter('accumulate_tokens', accumulate_tokens)}"
    outputs = "text_output:STRING num_input_tokens:INT32:1 num_output_tokens:INT32:1"
    return lambda repository: repository.model(name, " ".join(inputs), outputs, rest, batch=4)


@dataclass(frozen=True)
class Broken:
    """A broken repository. ``refused`` means that Triton does not load it."""

    build: Build
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


REFUSED = {
    "unreadable-config": _written('name: "broken"\nbackend: "python"\ninputs [ ]'),
    "duplicate-key": _steps("X", "Y", "fork X=X > P=p P=q", "join A=p B=q > Y=Y"),
    "missing-file": _edited(OF_FOUR, "dims: [ -1 ]", 'dims: [ -1 ] label_filename: "labels.txt"'),
    "invalid-tensor": _edited(OF_FOUR, "dims: [ 4 ]", "dims: [ 4 ] reshape { shape: [ 3 ] }"),
    "invalid-batching": _model("broken", "X:FP32:4", "Y", "dynamic_batching { preferred_batch_size: [ 16 ] }", batch=8),
    "invalid-sequence": _model("broken", "X:FP32:4", "Y", UNCLEAR, batch=8),
    "invalid-ensemble": _edited(
        ENSEMBLE, "ensemble_scheduling", "instance_group { kind: KIND_CPU } ensemble_scheduling"
    ),
    "invalid-setting": _model("broken", "X:FP32:4", "Y", "instance_group { kind: KIND_CPU gpus: [ 0 ] }", batch=8),
    "invalid-warmup": _model("broken", "X:FP32:4", "Y", 'model_warmup { name: "zeros" batch_size: 1 }', batch=8),
    "folder-name": _edited(PLAIN, '"broken"', '"borken"'),
    "invalid-size": _model("broken", "X:FP32:-5,3", "Y"),
    "unknown-model": _steps("X", "Y", "idnet X=X > Y=Y"),
    "unknown-version": _edited(ENSEMBLE, "model_version: -1", "model_version: 7"),
    "unknown-tensor": _steps("X", "Y", "ident X=X > Z=Y"),
    "unmapped-input": _steps("X", "Y", "join A=X > Y=Y"),
    "unwritten-tensor": _steps("X", "Y", "ident X=X > Y=mid", "join A=mid B=mit > Y=Y"),
    "unread-tensor": _steps("X", "Y", "fork X=X > P=Y Q=rest"),
    "written-twice": _steps("X", "Y", "ident X=X > Y=Y", "ident X=X > Y=Y"),
    "cycle": _steps("X", "Y", "join A=X B=b > Y=a", "fork X=a > P=b Q=Y"),
    "datatype-mismatch": _all(
        _model("whole", "X:INT64", "Y:INT64"), _steps("X", "Y:INT64", "ident X=X > Y=t", "whole X=t > Y=Y")
    ),
    "shape-mismatch": _all(
        _model("pairs", "X:FP32:-1,2", "Y:FP32:-1,2"),
        _steps("X", "Y:FP32:-1,2", "ident X=X > Y=t", "pairs X=t > Y=Y"),
    ),
    "batch-mismatch": _all(
        _model("pair_at_most", "X", "Y", batch=2), _steps("X", "Y", "pair_at_most X=X > Y=Y", batch=4)
    ),
    "decoupled-join": _steps("X", "Y", "tokens X=X > Y=t", "join A=t B=X > Y=Y"),
    "missing-script": _missing_script,
    "script-syntax": _model("broken", "X", "Y", script=SCRIPT.replace("requests):", "requests)")),
    "unknown-backend": _edited(PLAIN, '"python"', '"pyton"'),
}
TALK = "pipelines: {talk: {model: broken, session: %s}}\n"
LOADED: dict[str, tuple[Build, str]] = {
    "overwritten-value": (_model("broken", "X", "Y", "\n".join(parameter("limit", each) for each in "12")), ""),
    "excessive-size": (_model("broken", "X:FP32:9223372036854775807,-1", "Y"), ""),
    "omitted-input": (
        _all(_model("shy", "X", "Y", parameter("may_omit", "Y")), _steps("X", "Y", "shy X=X > Y=t", "ident X=t > Y=Y")),
        "",
    ),
    "bls-cycle": (_model("broken", "X", "Y", script=SCRIPT + AGAIN), ""),
    "cancel-instances": (
        _model(
            "broken",
            "X STOP:STRING:1:optional",
            "Y",
            f"{DECOUPLED}\ninstance_group [ {{ kind: KIND_CPU count: 2 }} ]",
        ),
        "pipelines: {write: {model: broken, cancel: {model: broken, input: STOP}}}\n",
    ),
    "gateway-yaml": (ENSEMBLE, "pipelines:\n  broken:\n    model: broken\n    outputs: {answer: {tensor: YY}}\n"),
    "router-needed": (
        _all(
            _model("head", "X", "Y", parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no")),
            _steps("X", "Y Z", "ident X=X > Y=features", "head X=features > Y=Y", "ident X=features > Y=Z"),
        ),
        "",
    ),
    "unordered-stream": (
        _all(
            _model("post", "X", "Y", "instance_group [ { kind: KIND_CPU count: 4 } ]"),
            _steps("X", "Y", "tokens X=X > Y=t", "post X=t > Y=Y"),
        ),
        "",
    ),
    "parallel-failure": (
        _all(
            _model("strict", "X", "Y", script=SCRIPT.replace("return", "raise ValueError(requests) or")),
            _steps("X", "Y Z", "strict X=X > Y=Y", "ident X=X > Y=Z"),
        ),
        "",
    ),
    "sample": (ENSEMBLE, "pipelines:\n  broken:\n    model: broken\n    sample:\n      x: [1.0]\n"),
    "needs-session": (_model("broken", "X", "Y", f"sequence_batching {{ {CONTROL} }}"), ""),
    "session-idle": (_summing("broken"), TALK % "true"),
    "session-places": (_summing("broken", idle_s=60), TALK % "{max_open: 10}"),
    "session-state": (
        _all(
            _summing("first", idle_s=60),
            _summing("second", idle_s=60),
            _model("between", "X:FP32:1", "Y:FP32:1", batch=4),
            _steps("X:FP32:1", "Y:FP32:1", "first X=X > Y=a", "between X=a > Y=b", "second X=b > Y=Y", batch=4),
        ),
        TALK % "true",
    ),
    "preset-mismatch": (_model("broken", f"{VLLM} {VLLM_COUNTS}", WITHOUT_FINISH_REASON, DECOUPLED), ""),
    "not-decoupled": (_not_decoupled, ""),
    "split-characters": (engine("broken"), ""),
    "no-health-check": (_written('name: "broken"\nbackend: "vllm"', model_json="{}"), ""),
    "special-tokens": (
        _model("broken", "PROMPT:STRING:1", "TEXT:STRING:1"),
        """
pipelines:
  chat:
    model: broken
    inputs: {prompt: {tensor: PROMPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    openai: {chat: {template_text: "{{ messages[0].content }}"}, tools: mistral}
""",
    ),
    "batches-of-one": (_model("broken", "X", "Y", batch=8), "pipelines: {score: {model: broken}}\n"),
    "unknown-edge": (
        _all(
            _written('name: "auto"\nbackend: "python"', model_py=SCRIPT),
            _steps("X", "Y", "auto X=X > Y=t", "ident X=t > Y=Y"),
        ),
        "",
    ),
}
"""Code -> the models, and the gateway.yaml with which the linter finds it, or an empty text."""
BROKEN = {code: Broken(build, refused=True) for code, build in REFUSED.items()}
BROKEN |= {code: Broken(build, refused=False, gateway=gateway) for code, (build, gateway) in LOADED.items()}
