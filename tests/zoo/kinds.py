"""The table of the kinds of models. A new kind is one row.

The form of a tensor is, for example, ``FP32[3,640,640]``, ``INT64[1..512]?`` or ``BYTES[1] of 0..9``. A dimension
``a..b`` is free (-1 in Triton's configuration) and has a random size from ``a`` to ``b``. ``?`` marks an optional
input. ``of a..b`` is the number of characters of each text, or of bytes with ``raw``, which is rarely UTF-8.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FORM = re.compile(r"(\w+)\[([^\]]*)\](\??)(?: of (\d+)\.\.(\d+))?( raw)?")
DTYPES: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BF16": np.uint16,  # the upper half of an FP32
    "BYTES": np.object_,
}
LETTERS = 'abcdefghij \n"\\<é日😀'


class Range(NamedTuple):
    low: int
    high: int

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)


@dataclass(frozen=True)
class Form:
    datatype: str
    sizes: tuple[Range, ...]
    is_free: tuple[bool, ...]
    is_optional: bool
    characters: Range
    is_raw: bool

    @classmethod
    def of(cls, text: str) -> "Form":
        found = FORM.fullmatch(text)
        assert found, text
        datatype, dims, optional, low, high, raw = found.groups()
        ends = [dim.partition("..") for dim in dims.split(",") if dim]
        return cls(
            datatype=datatype,
            sizes=tuple(Range(int(first), int(last or first)) for first, _, last in ends),
            is_free=tuple(bool(dots) for _, dots, _ in ends),
            is_optional=bool(optional),
            characters=Range(int(low or 0), int(high or 40)),
            is_raw=bool(raw),
        )

    @property
    def dims(self) -> list[int]:
        """The dimensions as in a configuration."""
        return [-1 if free else size.low for free, size in zip(self.is_free, self.sizes, strict=True)]

    def array(self, random: Random, batch: tuple[int, ...] = ()) -> NDArray[np.generic]:
        shape = (*batch, *(size.draw(random) for size in self.sizes))
        values = np.random.default_rng(random.getrandbits(64))
        if self.datatype == "BYTES":
            return self._elements(random, shape)
        if self.datatype == "BF16":
            wide = (values.integers(-128, 128, shape) / 8).astype(np.float32)
            return (wide.view(np.uint32) >> 16).astype(np.uint16)
        dtype = np.dtype(DTYPES[self.datatype])
        if dtype.kind == "f":
            return (values.integers(-1024, 1024, shape) / 64).astype(dtype)
        if dtype.kind == "b":
            return values.integers(0, 2, shape).astype(dtype)
        limits = np.iinfo(dtype)  # type: ignore[arg-type]
        return values.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)  # type: ignore[arg-type]

    def _elements(self, random: Random, shape: tuple[int, ...]) -> NDArray[np.object_]:
        array = np.empty(shape, np.object_)
        for index in np.ndindex(shape):
            size = self.characters.draw(random)
            array[index] = random.randbytes(size) if self.is_raw else "".join(random.choices(LETTERS, k=size)).encode()
        return array


MANY_ELEMENTS = 100_000


@dataclass(frozen=True)
class Step:
    """A step of an ensemble: the tensors of the ensemble for the inputs and outputs of a model."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Kind:
    """A row of the table.

    Attributes:
        inputs: Name -> form of the input (``Form``).
        outputs: The same for the outputs.
        batch: `max_batch_size`; 0: the model has no batch dimension.
        responses: None, or how many responses a decoupled model sends.
        final: Whether the final flag comes with the last response (`joined`) or `apart`.
        gaps: Whether responses without outputs are between the others.
        rows: How many rows each output has, if not as many as the inputs.
        may_omit: Outputs that half of the responses do not have.
        habit: The function of `model.py`.
        steps: Of an ensemble.
        config: Further lines of `config.pbtxt`.
        kinds: Field -> `kind` in `gateway.yaml`, if not `number` or `text`.
        single: Tensors with a free dimension that are declared as a single value.
        pipeline: Further keys of the pipeline in `gateway.yaml`.
        fixed: Input -> the values that the random requests use.
        parameters: Request parameter -> values, for `/v2`.
        sample: Of the pipeline, whose requests then may share calls.
        fault: The output for which the trial of the sample refuses shared calls.
        heavy: JSON of this kind takes seconds: only the long form sends it.
    """

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    batch: int = 0
    responses: tuple[int, int] | None = None
    final: str = "apart"
    gaps: bool = False
    rows: tuple[int, int] | None = None
    may_omit: Sequence[str] = ()
    habit: str = "generate"
    steps: Sequence[Step] = ()
    config: str = ""
    kinds: Mapping[str, str] = field(default_factory=dict)
    single: Sequence[str] = ()
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    parameters: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    sample: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    heavy: bool = False

    @cached_property
    def input_forms(self) -> dict[str, Form]:
        return {name: Form.of(text) for name, text in self.inputs.items()}

    @cached_property
    def output_forms(self) -> dict[str, Form]:
        return {name: Form.of(text) for name, text in self.outputs.items()}

    @property
    def is_decoupled(self) -> bool:
        return self.responses is not None

    @property
    def is_large(self) -> bool:
        """Whether JSON of many rows takes long."""
        forms = (self.input_forms | self.output_forms).values()
        return any(math.prod(size.high for size in form.sizes) > MANY_ELEMENTS for form in forms)

    def is_single(self, tensor: str) -> bool:
        """Whether a caller of the pipeline sees one value instead of a list."""
        form = self.input_forms.get(tensor) or self.output_forms[tensor]
        return tensor in self.single or form.dims in ([], [1])

    def kind_of(self, tensor: str) -> str:
        """The ``kind`` of an input or output in ``gateway.yaml``."""
        form = self.input_forms.get(tensor) or self.output_forms[tensor]
        return self.kinds.get(tensor, "text" if form.datatype == "BYTES" else "number")


IMAGE = {"IMAGE": "BYTES[1] of 20..200000 raw"}
NUMBER = {"X": "INT32[1]"}
NUMBER_AND_TEXT = {"Y": "INT32[1]", "TEXT": "BYTES[1] of 1..8"}
IDS = {"input_ids": "INT64[1..128]", "attention_mask": "INT64[1..128]", "token_type_ids": "INT64[1..128]?"}
FLAGS = ("stream", "exclude_input_in_output", "return_finish_reason", "return_cumulative_logprob", "return_logprobs")
COUNTS = ("return_num_input_tokens", "return_num_output_tokens")
OF_VLLM = dict.fromkeys(FLAGS + COUNTS, "BOOL[1]?")
EMBEDDING = [
    b'{"input": "Hello"}',
    b'{"input": [3, 1, 2], "pooling_params": {"dimensions": [2]}}',
    b'{"input": "Hello", "pooling_params": {"dimensions": [300]}}',
]
IMAGES = ["iVBORw0KGgoAAA==", "R0lGODlhAQ=="]
"""The first bytes of a PNG and a GIF."""
IMAGE_URLS = [f"data:image/{kind};base64,{image}" for kind, image in zip(("png", "gif"), IMAGES, strict=True)]
SAMPLING = [b'{"max_tokens": 8}', b'{"temperature": 0.5, "top_p": 0.9}', b'{"n": 3}', b'{"foo": 1}']

KINDS = (
    # Language models.
    Kind(
        "vllm",
        {"text_input": "BYTES[1] of 1..200", "image": "BYTES[0..2]?", "sampling_parameters": "BYTES[1]?", **OF_VLLM},
        {
            "text_output": "BYTES[1..3]",
            "finish_reason": "BYTES[1..3]",
            "cumulative_logprob": "FP32[1..3]",
            "logprobs": "BYTES[1..3]",
            "num_input_tokens": "UINT32[1]",
            "num_output_tokens": "UINT32[1..3]",
        },
        responses=(1, 12),
        habit="vllm",
        single=("text_output", "finish_reason"),
        pipeline={"openai": {"completions": {"prompt": "text_input", "text": "text_output"}}},
        fixed={"sampling_parameters": SAMPLING, "image": [each.encode() for each in IMAGES]},
    ),
    Kind(
        "vllm_embeddings",
        {"text_input": "BYTES[1] of 0..8", "embedding_request": "BYTES[1]", "return_num_input_tokens": "BOOL[1]?"},
        {"text_output": "BYTES[1..3]", "num_input_tokens": "UINT32[1]"},
        responses=(1, 1),
        habit="vllm_embeddings",
        single=("text_output",),
        fixed={"embedding_request": EMBEDDING},
    ),
    Kind(
        "tensorrt_llm",
        {
            "text_input": "BYTES[1] of 1..200",
            "max_tokens": "INT32[1]",
            "stop_words": "BYTES[0..3]? of 1..8",
            "temperature": "FP32[1]?",
            "seed": "UINT64[1]?",
            "stream": "BOOL[1]?",
            "return_num_output_tokens": "BOOL[1]?",
        },
        {"text_output": "BYTES[1..1]", "cum_log_probs": "FP32[1..1]", "num_output_tokens": "INT32[1]"},
        batch=1,
        responses=(1, 16),
        habit="tensorrt_llm",
        single=("text_output", "cum_log_probs"),
        final="joined",
    ),
    Kind(
        "tensorrt_llm_api",
        {
            "text_input": "BYTES[1..1] of 1..200",
            "image_url": "BYTES[0..2]?",
            "streaming": "BOOL[1]?",
            "sampling_param_max_tokens": "INT32[1]?",
            "return_finish_reason": "BOOL[1]?",
        },
        {"text_output": "BYTES[1..1]", "finish_reason": "BYTES[1..1]"},
        responses=(1, 16),
        habit="tensorrt_llm_api",
        single=("text_input", "text_output", "finish_reason"),
        fixed={"image_url": [each.encode() for each in IMAGE_URLS]},
    ),
    Kind("lm_head", {"HIDDEN": "BF16[1..16,64]"}, {"HIDDEN_OUT": "BF16[1..16,64]"}, batch=4, habit="echo"),
    Kind(
        "storyteller",
        {"PROMPT": "BYTES[1] of 1..200"},
        {"TEXT": "BYTES[1] of 0..6"},
        responses=(1, 40),
        pipeline={"openai": {"completions": {"prompt": "PROMPT", "text": "TEXT"}}},
    ),
    # Speech.
    Kind(
        "whisper",
        {"WAV": "FP32[480000]"},
        {"TEXT": "BYTES[1] of 0..2000", "TIMES": "FP32[0..60,2]"},
        batch=4,
        heavy=True,
    ),
    Kind("speech", {"TEXT": "BYTES[1] of 1..300"}, {"AUDIO": "FP32[8000..50000]"}, responses=(1, 8)),
    Kind(
        "speech_pcm", {"TEXT": "BYTES[1] of 1..300"}, {"PCM": "INT16[15000..100000]"}, responses=(1, 8), final="joined"
    ),
    # Images and video.
    Kind(
        "painter",
        {"PROMPT": "BYTES[1] of 1..300", "SEED": "UINT64[1]?"},
        {"IMAGE": "UINT8[512..1024,512..1024,3]"},
        heavy=True,
    ),
    Kind("yolo", {"images": "FP32[3,640,640]"}, {"output0": "FP32[84,8400]"}, batch=8, heavy=True),
    Kind("resnet", {"PIXELS": "FP32[3,224,224]"}, {"SCORES": "FP32[1000]"}, batch=8, heavy=True),
    Kind("clip", {"PIXELS": "FP16[3,224,224]"}, {"VECTOR": "FP16[512]"}, batch=8, heavy=True),
    Kind("dali", IMAGE, {"PIXELS": "UINT8[224,224,3]"}, batch=8, kinds={"IMAGE": "image"}),
    Kind("dali_bytes", {"ENCODED": "UINT8[100..5000]"}, {"PIXELS": "UINT8[224,224,3]"}, batch=8),
    Kind("pixels", {"PIXELS": "UINT8[224,224,3]"}, {"VECTOR": "FP16[512]"}, batch=8),
    Kind(
        "detector",
        {"IMAGE": "UINT8[64..256,64..256,3]"},
        {"BOXES": "FP32[0..0,4]", "SCORES": "FP32[0..0]", "CLASSES": "INT64[1..20]"},
    ),
    Kind("video", {"FRAMES": "UINT8[2,720,1280,3]"}, {"LABELS": "FP32[400]"}, heavy=True),
    # Texts and tables.
    Kind("bert", IDS, {"HIDDEN": "FP32[1..64,32]", "POOLED": "FP32[32]"}, batch=16, config="RAGGED"),
    Kind("cross_encoder", IDS, {"LOGIT": "FP32[1]"}, batch=32),
    Kind(
        "embedder",
        {"TEXT": "BYTES[1] of 0..500"},
        {"VECTOR": "FP32[384]"},
        batch=64,
        pipeline={"openai": {"embeddings": {"input": "TEXT", "embedding": "VECTOR"}}},
        sample={"TEXT": "Hello"},
    ),
    Kind("trees", {"ROWS": "FP32[1..64,8]"}, {"MARGIN": "FP32[1..64,1]"}),
    Kind(
        "trees_batched",
        {"ROW": "FP32[8]"},
        {"MARGIN": "FP32[1]"},
        batch=64,
        config="dynamic_batching {}",
        sample={"ROW": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]},
    ),
    # Forms of tensors and of answers.
    Kind("other_rows", {"X": "FP32[4]"}, {"FOUND": "FP32[6]"}, batch=8, rows=(0, 12)),
    Kind("silent", {"X": "INT32[1]"}, {"Y": "INT32[1]"}, responses=(0, 0)),
    Kind("single", {"X": "INT32[1]"}, {"Y": "INT32[0..9]"}, responses=(1, 1), final="joined"),
    Kind("gaps", {"X": "INT32[1]"}, {"Y": "INT32[0..9]", "T": "BYTES[0..3]"}, responses=(0, 12), gaps=True),
    Kind(
        "blobs",
        {"BLOB": "BYTES[1] of 0..1000000 raw"},
        {"BLOBS": "BYTES[0..3] of 0..1000000 raw", "LABEL": "BYTES[1] of 0..20 raw"},
        kinds={"BLOB": "binary", "BLOBS": "binary"},
    ),
    Kind(
        "types",
        {f"T{index}": f"{name}[1..7]" for index, name in enumerate(("BOOL", "INT8", "UINT64", "FP64", "UINT16"))},
        {f"T{index}_OUT": f"{name}[1..7]" for index, name in enumerate(("BOOL", "INT8", "UINT64", "FP64", "UINT16"))},
        habit="echo",
    ),
    Kind("cube_batched", {"X": "INT32[1..4,1..4,1..4]"}, {"Y": "FP64[0..4,0..4,0..4]", "N": "INT8[]"}, batch=64),
    Kind(
        "forgetful",
        {"X": "FP32[1..4]", "HINT": "BYTES[1]?"},
        {"A": "FP32[1..4]", "B": "BYTES[1..4]"},
        may_omit=("B",),
        pipeline={"early_exit": [{"reason": "nothing", "missing": ["B"]}]},
    ),
    # Settings of Triton.
    Kind("cached", {"X": "FP32[4]"}, {"Y": "FP32[4]"}, batch=8, config="response_cache { enable: true }"),
    Kind(
        "priorities",
        {"X": "FP32[4]"},
        {"Y": "FP32[4]"},
        batch=8,
        config="dynamic_batching { priority_levels: 3 default_priority_level: 2 "
        "default_queue_policy { max_queue_size: 500 timeout_action: REJECT allow_timeout_override: true } }",
        parameters={"priority": [1, 2, 3]},
    ),
    Kind(
        "iterative",
        {"X": "INT32[1]"},
        {"RUNS": "INT32[1]"},
        batch=1,
        habit="iterative",
        config="sequence_batching { iterative_sequence: true }",
        fixed={"X": [1, 2, 7]},
    ),
    # Batches whose outputs do not have one row for each item, in order.
    Kind("repeats_row", NUMBER, NUMBER_AND_TEXT, batch=8, habit="repeats_row", sample={"X": 3}, fault="Y"),
    Kind("omits_output", NUMBER, NUMBER_AND_TEXT, batch=8, habit="omits_output", sample={"X": 3}, fault="TEXT"),
    # Ensembles of the models above.
    Kind(
        "photo_search",
        IMAGE,
        {"VECTOR": "FP16[512]"},
        batch=8,
        kinds={"IMAGE": "image"},
        steps=[
            Step("dali", {"IMAGE": "IMAGE"}, {"PIXELS": "p"}),
            Step("pixels", {"PIXELS": "p"}, {"VECTOR": "VECTOR"}),
        ],
    ),
    Kind(
        "incomplete",
        {"X": "FP32[1..4]"},
        {"A": "FP32[1..4]", "B": "BYTES[1..4]"},
        steps=[Step("forgetful", {"X": "X"}, {"A": "A", "B": "B"})],
        pipeline={"early_exit": [{"reason": "nothing", "missing": ["B"]}]},
    ),
    Kind(
        "spoken_story",
        {"TEXT": "BYTES[1] of 1..300"},
        {"PCM": "INT16[15000..100000]"},
        responses=(1, 8),
        steps=[Step("speech_pcm", {"TEXT": "TEXT"}, {"PCM": "PCM"})],
    ),
)
BY_NAME = {kind.name: kind for kind in KINDS}
