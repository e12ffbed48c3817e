"""The stand-in of every kind: its outputs depend on nothing but its inputs, so that two equal calls have equal answers.

The parameter ``zoo`` of the configuration has the row of the table as JSON: the ``habit``, a function of this file, and
the forms of the outputs. The content of a row of a batch depends on this row of the inputs.
"""

import base64
import json
import random
import re
import zlib

import numpy as np
import triton_python_backend_utils as pb_utils

LETTERS = 'abcdefghij \n"\\<é日😀'
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
SAY = b"Please write: "
"""What follows it in a prompt is the answer of the vLLM stand-in, four bytes at a time."""
SAMPLING = {
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "logprobs"),
    *("ignore_eos", "skip_special_tokens", "structured_outputs"),
}
MARKER = b"<image>"
"""The place of an image in a prompt."""
SEEN_BYTES = 128
"""How much a vision model says of an image."""
CONTEXT = 2000
"""The longest prompt of vLLM, in characters."""


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.row = json.loads(config["parameters"]["zoo"]["string_value"])
        self.batches = config["max_batch_size"] > 0
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self.types = {each["name"]: each["data_type"] for each in config["output"]}
        self.habit = globals()[self.row["habit"]]
        self.states = {}

    def execute(self, requests):
        if not self.decoupled:
            return [next(self.habit(self, request)) for request in requests]
        for request in requests:
            self._stream(request)
        return None

    def _stream(self, request):
        """Sends the final flag with the last response, or apart from it."""
        sender = request.get_response_sender()
        waiting = None
        for response in self.habit(self, request):
            if waiting is not None:
                sender.send(waiting)
            waiting = response
        if waiting is not None and self.row["final"] == "joined":
            sender.send(waiting, flags=FINAL)
            return
        if waiting is not None:
            sender.send(waiting)
        sender.send(flags=FINAL)

    def seeds_of(self, inputs):
        """One number for each row, or a single number if the model has no batches."""
        if not self.batches:
            return _seed(inputs.values())
        rows = max(len(array) for array in inputs.values())
        return [_seed(_at(array, row) for array in inputs.values()) for row in range(rows)]

    def tensors(self, seeds, sizes, skipped=()):
        """The outputs with one row for each of ``seeds``, which is a single number if the model has no batches."""
        for name, form in self.row["outputs"].items():
            if name not in skipped:
                shape = [sizes.randint(low, high) for low, high in form["sizes"]]
                yield _tensor(name, self.types[name], form, seeds, shape)


def generate(model, request):
    """A random number of responses in the declared range, with empty ones between them if declared."""
    inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    seeds, sizes = model.seeds_of(inputs), random.Random(_seed(inputs.values()))
    if model.batches and model.row["rows"] is not None:
        seeds = [seeds[0] + row for row in range(sizes.randint(*model.row["rows"]))]
    for number in range(sizes.randint(*model.row["responses"])):
        skipped = [name for name in model.row["may_omit"] if sizes.random() < 0.5]
        yield pb_utils.InferenceResponse(list(model.tensors(_moved(seeds, number), sizes, skipped)))
        if model.row["gaps"] and sizes.random() < 0.5:
            yield pb_utils.InferenceResponse([])


def echo(model, request):
    """Each input as the output of the same name with ``_OUT``, through DLPack: numpy has no BF16."""
    yield pb_utils.InferenceResponse(
        [
            pb_utils.Tensor(f"{tensor.name()}_OUT", tensor.as_numpy())
            if model.types[f"{tensor.name()}_OUT"] == "TYPE_STRING"
            else pb_utils.Tensor.from_dlpack(f"{tensor.name()}_OUT", tensor.to_dlpack())
            for tensor in request.inputs()
        ]
    )


def repeats_row(model, request):
    yield _of_rows(model, request, lambda seeds: seeds[:1] + seeds[:-1])


def omits_output(model, request):
    """Omits the text of several rows."""
    yield _of_rows(model, request, list, lambda seeds: ["TEXT"] if len(seeds) > 1 else [])


def _of_rows(model, request, change, skipped=lambda seeds: []):
    """The outputs of the rows after a change, without the skipped outputs."""
    seeds = model.seeds_of({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
    return pb_utils.InferenceResponse(list(model.tensors(change(seeds), random.Random(0), skipped(seeds))))


def vllm(_model, request):
    """NVIDIA's vLLM backend: a scalar as token count, `None` as a text, NaN, sequences of unequal lengths."""
    given = _first_elements(request)
    sampling = json.loads(given.get("sampling_parameters", b"{}"))
    choices = random.Random(_seed([np.array([given["text_input"]], np.object_)]))
    if set(sampling) - SAMPLING:
        yield _failure("Error generating stream: 'NoneType' object has no attribute 'lora_name'")
        return
    if len(given["text_input"]) > CONTEXT:
        length = len(given["text_input"])
        text = f"The decoder prompt (length {length}) is longer than the maximum model length of {CONTEXT}"
        yield _failure(f"Error generating stream: {text}")
        return
    said = _seen(given["text_input"], _elements_of(request, "image")) or given["text_input"].partition(SAY)[2]
    if said:
        for start in range(0, len(said), 4):
            reason = "stop" if start + 4 >= len(said) else "None"
            yield pb_utils.InferenceResponse(_of_vllm(given, [said[start : start + 4]], [reason], 1))
        return
    lengths = [choices.randint(1, 12) for _ in range(sampling.get("n", 1))]
    if not given.get("stream", False):
        before = b"" if given.get("exclude_input_in_output", False) else given["text_input"]
        pieces = b"".join(_token(choices) for _ in range(lengths[0]))
        yield pb_utils.InferenceResponse(_of_vllm(given, [before + pieces], ["stop"], lengths[0]))
        return
    for step in range(max(lengths)):
        advanced = [length for length in lengths if step < length]
        texts = [_token(choices) for _ in advanced]
        reasons = ["length" if step + 1 == length else "None" for length in advanced]
        yield pb_utils.InferenceResponse(_of_vllm(given, texts, reasons, 1))


def _of_vllm(given, texts, reasons, tokens):
    outputs = [_texts("text_output", texts)]
    if given.get("return_finish_reason", False):
        outputs.append(_texts("finish_reason", [reason.encode() for reason in reasons]))
    if given.get("return_cumulative_logprob", False):
        outputs.append(pb_utils.Tensor("cumulative_logprob", np.full(len(texts), np.nan, np.float32)))
    if given.get("return_logprobs", False):
        count = json.loads(given.get("sampling_parameters", b"{}")).get("logprobs")
        outputs.append(_texts("logprobs", [b"null" if count is None else _logprobs(text) for text in texts]))
    if given.get("return_num_input_tokens", False):
        outputs.append(pb_utils.Tensor("num_input_tokens", np.array(7, np.uint32)))
    if given.get("return_num_output_tokens", False):
        outputs.append(pb_utils.Tensor("num_output_tokens", np.full(len(texts), tokens, np.uint32)))
    return outputs


def vllm_embeddings(_model, request):
    """The vLLM backend with an embedding model: a JSON list as text, of up to 256 numbers that tell the input."""
    given = _first_elements(request)
    wanted = json.loads(given["embedding_request"])
    size = wanted.get("pooling_params", {}).get("dimensions", [4])[0]
    if size > 256:
        yield _failure("Error generating stream: Model only supports [2, 4, 256] matryoshka dimensions")
        return
    first = wanted["input"][0] if isinstance(wanted["input"], list) else len(wanted["input"])
    outputs = [_texts("text_output", [json.dumps([first, *[0.5] * (size - 1)]).encode()])]
    if given.get("return_num_input_tokens", False):
        outputs.append(pb_utils.Tensor("num_input_tokens", np.array(len(wanted["input"]), np.uint32)))
    yield pb_utils.InferenceResponse(outputs)


def _logprobs(text):
    """The chosen token, and another one."""
    chosen = {"logprob": -0.5, "rank": 1, "decoded_token": text.decode()}
    other = {"logprob": -1.5, "rank": 2, "decoded_token": "?"}
    return json.dumps([{"11": chosen, "12": other}]).encode()


def tensorrt_llm(_model, request):
    """The engine-based ensemble: the shape is [1, n], and without `stream` one response."""
    given = _first_elements(request)
    choices = random.Random(_seed([np.array([given["text_input"]], np.object_)]))
    pieces = [_token(choices) for _ in range(max(1, min(int(given["max_tokens"]), 16)))]
    for number, piece in enumerate(pieces if given.get("stream", False) else [b"".join(pieces)]):
        outputs = [
            _texts("text_output", [piece], (1, 1)),
            pb_utils.Tensor("cum_log_probs", np.zeros((1, 1), np.float32)),
        ]
        if given.get("return_num_output_tokens", False):
            outputs.append(pb_utils.Tensor("num_output_tokens", np.array([[number + 1]], np.int32)))
        yield pb_utils.InferenceResponse(outputs)


def tensorrt_llm_api(_model, request):
    """The LLM API model: each streamed response repeats everything so far."""
    given = _first_elements(request)
    choices = random.Random(_seed([np.array([given["text_input"]], np.object_)]))
    limit = int(given.get("sampling_param_max_tokens", 8))
    said = _seen(given["text_input"], [_data_of(url) for url in _elements_of(request, "image_url")])
    pieces = [said[start : start + 4] for start in range(0, len(said), 4)]
    pieces = pieces or [_token(choices) for _ in range(max(1, min(limit, 16)))]
    for number in range(1, len(pieces) + 1):
        if given.get("streaming", False) or number == len(pieces):
            outputs = [_texts("text_output", [b"".join(pieces[:number])])]
            if given.get("return_finish_reason", False):
                outputs.append(_texts("finish_reason", [b"length" if number == len(pieces) else b"None"]))
            yield pb_utils.InferenceResponse(outputs)


def iterative(model, request):
    """Asks Triton to run the request again until it has counted down; then the number of runs is the answer."""
    key, wanted = request.correlation_id(), int(request.inputs()[0].as_numpy().reshape(-1)[0])
    model.states[key] = runs = model.states.get(key, 0) + 1
    if runs < wanted:
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        yield None
    else:
        del model.states[key]
        yield pb_utils.InferenceResponse([pb_utils.Tensor("RUNS", np.array([[runs]], np.int32))])


def _seen(prompt, images):
    """What a vision model says: how many markers the prompt has, and the first bytes of each image."""
    contents = [base64.b64decode(image, validate=True)[:SEEN_BYTES] for image in images]
    return b" ".join([b"%d:" % prompt.count(MARKER), *(each.hex().encode() for each in contents)]) if contents else b""


def _data_of(url):
    """The base64 of a data URL whose media type is that of its content."""
    media_type, data = re.fullmatch(rb"data:image/(png|gif);base64,(.*)", url).groups()
    assert media_type in base64.b64decode(data).lower()
    return data


def _elements_of(request, name):
    return [each for tensor in request.inputs() if tensor.name() == name for each in tensor.as_numpy().reshape(-1)]


def _first_elements(request):
    arrays = {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in request.inputs()}
    return {name: array[0] for name, array in arrays.items() if array.size}


def _token(choices):
    return "".join(choices.choices(LETTERS, k=choices.randint(0, 6))).encode()


def _texts(name, texts, shape=(-1,)):
    return pb_utils.Tensor(name, np.array(texts, np.object_).reshape(shape))


def _failure(message):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))


def _tensor(name, datatype, form, seeds, shape):
    if isinstance(seeds, int):
        return pb_utils.Tensor(name, _array(datatype, form, seeds, shape))
    rows = [_array(datatype, form, seed, shape) for seed in seeds]
    return pb_utils.Tensor(name, np.stack(rows) if rows else np.empty((0, *shape), np.float32))


def _array(datatype, form, seed, shape):
    if datatype == "TYPE_STRING":
        return _elements(form, random.Random(seed), shape)
    dtype = np.dtype(pb_utils.triton_string_to_numpy(datatype))
    values = np.random.default_rng(seed)
    if dtype.kind == "b":
        return values.integers(0, 2, shape).astype(dtype)
    if dtype.kind == "f":
        return (values.integers(-1024, 1024, shape) / 64).astype(dtype)
    return np.frombuffer(values.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def _elements(form, choices, shape):
    array = np.empty(shape, np.object_)
    for index in np.ndindex(*shape):
        size = choices.randint(*form["characters"])
        array[index] = choices.randbytes(size) if form["raw"] else "".join(choices.choices(LETTERS, k=size)).encode()
    return array


def _seed(arrays):
    seed = 0
    for array in arrays:
        content = (
            b"\0".join(array.reshape(-1).tolist()) if array.dtype == object else np.ascontiguousarray(array).tobytes()
        )
        seed = zlib.crc32(content, seed)
    return seed


def _at(array, row):
    return array[row : row + 1]


def _moved(seeds, number):
    return seeds + number if isinstance(seeds, int) else [seed + number for seed in seeds]
