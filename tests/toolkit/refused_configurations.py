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
_TABLE = Path(__file__).with_suffix(".txt")
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


REFUSED = list(_parsed(_TABLE.read_text()))
"""One for each text of app/triton/refusals.py that a process of Triton can show."""
