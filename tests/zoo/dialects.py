"""The ways to call a model through the gateway. Each raises AssertionError if the answer is not that of Triton."""

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from random import Random
from typing import Any

import httpx
import numpy as np
import orjson
from httpx_sse import EventSource, ServerSentEvent

from tests.live.side_by_side import HEADER, with_binary
from tests.zoo.cases import Case, Tensor, Tensors, Truth
from tests.zoo.kinds import Kind
from tests.zoo.repository import BATCHED

EARLY_EXIT = "nothing"
"""The reason that the table declares for a missing output."""


def values_of(tensor: Tensor) -> list[Any]:
    """The flat JSON values of a tensor: NaN and infinity are null, bytes that are not UTF-8 are U+FFFD."""
    array = wide(tensor).reshape(-1)
    is_json = tensor.datatype != "BYTES" and np.isfinite(array).all()
    return array.tolist() if is_json else [_converted(each, "text") for each in array.tolist()]


def wide(tensor: Tensor) -> np.ndarray[Any, Any]:
    """BF16 as FP32."""
    if tensor.datatype != "BF16":
        return tensor.array
    return (tensor.array.astype(np.uint32) << 16).view(np.float32)


def nested(tensor: Tensor, kind: str, *, has_batch: bool, keeps_batch: bool, is_single: bool) -> Any:
    """The JSON value of a field of a pipeline."""
    array = wide(tensor)
    if has_batch and not keeps_batch:
        array = array[0]
    if is_single:
        array = array.reshape(array.shape[0]) if keeps_batch else array.reshape(())
    is_json = tensor.datatype != "BYTES" and np.isfinite(array).all()
    return array.tolist() if is_json else _converted(array.tolist(), kind)


def event_of(kind: Kind, response: Tensors, *, batch: bool) -> dict[str, Any]:
    """One response as the outputs of a pipeline. A text that may be split over responses is left as bytes."""
    event = {}
    for name in kind.output_forms:
        bare = kind.is_single(name) and not batch
        tensor = response.get(name)
        if tensor is None or not tensor.array.size:
            event[name] = b"" if is_run_of_text(kind, name, batch=batch) else None if bare else []
        elif is_run_of_text(kind, name, batch=batch):
            event[name] = tensor.array.item()
        else:
            event[name] = nested(
                tensor, kind.kind_of(name), has_batch=kind.batch > 0, keeps_batch=batch, is_single=kind.is_single(name)
            )
    return event


def is_run_of_text(kind: Kind, name: str, *, batch: bool) -> bool:
    return kind.is_decoupled and kind.is_single(name) and kind.kind_of(name) == "text" and not batch


def joined(kind: Kind, truth: Truth, *, batch: bool) -> dict[str, Any]:
    """The unary answer: a text is concatenated, lists are joined."""
    events = [event_of(kind, response, batch=batch) for response in truth.responses]
    if not kind.is_decoupled:
        return events[0]
    whole: dict[str, Any] = {}
    for name in kind.output_forms:
        parts = [event[name] for event in events]
        if is_run_of_text(kind, name, batch=batch):
            whole[name] = b"".join(parts).decode("utf-8", "replace")
        elif kind.is_single(name) and not batch:
            whole[name] = [part for part in parts if part is not None]
        else:
            whole[name] = [item for part in parts for item in part]
    return whole


def body_of(case: Case, *, batch: bool) -> dict[str, Any]:
    """The JSON body for the pipeline of a kind."""
    return {
        name: nested(
            tensor,
            case.kind.kind_of(name),
            has_batch=case.kind.batch > 0,
            keeps_batch=batch,
            is_single=case.kind.is_single(name),
        )
        for name, tensor in case.inputs.items()
    }


def is_json(case: Case) -> bool:
    """Whether JSON can express the inputs under `/v2`: texts must be UTF-8."""
    return not any(form.is_raw for form in case.kind.input_forms.values())


def _converted(values: Any, kind: str) -> Any:
    """The JSON of a list or an element of a tensor."""
    if isinstance(values, list):
        return [_converted(each, kind) for each in values]
    if not isinstance(values, bytes):
        return values if np.isfinite(values) else None
    if kind == "text":
        return values.decode("utf-8", "replace")
    return json.loads(values) if kind == "json" else base64.b64encode(values).decode()


Dialect = Callable[[httpx.Client, Case, Truth, Random], None]

MOST_BUSY_S = 300.0


def oip_binary(client: httpx.Client, case: Case, truth: Truth, random: Random) -> None:
    """`/v2/models/{model}/infer` with binary tensors both ways."""
    answer = _inferred(client, case, binary_inputs=True, binary_outputs=True)
    if not _is_refused(answer, case, truth):
        assert _tensors_of(answer) == truth.responses[0]


def oip_json(client: httpx.Client, case: Case, truth: Truth, random: Random) -> None:
    """`/v2/models/{model}/infer` with JSON both ways."""
    _check_json(_inferred(client, case, binary_inputs=False, binary_outputs=False), case, truth)


def oip_json_answer(client: httpx.Client, case: Case, truth: Truth, random: Random) -> None:
    """`/v2/models/{model}/infer` with binary inputs and JSON outputs."""
    _check_json(_inferred(client, case, binary_inputs=True, binary_outputs=False), case, truth)


def generate(client: httpx.Client, case: Case, truth: Truth, random: Random) -> None:
    """`/v2/models/{model}/generate`."""
    answer = _post(client, f"/v2/models/{case.kind.name}/generate", _generate_body(case))
    if _is_refused(answer, case, truth):
        return
    found = answer.json()
    assert {name: found[name] for name in truth.responses[0]} == _generated(truth.responses[0])


def generate_stream(client: httpx.Client, case: Case, truth: Truth, random: Random) -> None:
    """`/v2/models/{model}/generate_stream`."""
    answer = _when_free(lambda: _post(client, f"/v2/models/{case.kind.name}/generate_stream", _generate_body(case)))
    events = [event.json() for event in _events_of(answer)]
    if truth.error is not None:
        assert "error" in events.pop()
    assert answer.status_code == (400 if truth.error and not truth.responses else 200), answer.text[:500]
    assert len(events) == len(truth.responses)
    for found, response in zip(events, truth.responses, strict=True):
        assert {name: found.get(name) for name in response} == _generated(response)


def pipeline(client: httpx.Client, case: Case, truth: Truth, random: Random) -> None:
    """`POST /v1/pipelines/{pipeline}` with JSON."""
    name, batch = _pipeline_of(case, random)
    answer = _post(client, f"/v1/pipelines/{name}", body_of(case, batch=batch))
    _check_unary(answer, case.kind, truth, batch=batch)


def form(client: httpx.Client, case: Case, truth: Truth, random: Random) -> None:
    """`POST /v1/pipelines/{pipeline}` with a form: files as parts, the other fields as text or JSON."""
    body = body_of(case, batch=False)
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in body.items()}
    parts = {name: (None, text) for name, text in texts.items() if not _is_file(case, name)}
    files = {name: ("a file", tensor.array.item()) for name, tensor in case.inputs.items() if _is_file(case, name)}
    answer = client.post(f"/v1/pipelines/{case.kind.name}", files={**parts, **files})
    _check_unary(answer, case.kind, truth, batch=False)


def raw_body(client: httpx.Client, case: Case, truth: Truth, random: Random) -> None:
    """`POST /v1/pipelines/{pipeline}` with the bytes of the only file."""
    (tensor,) = case.inputs.values()
    headers = {"content-type": "application/octet-stream"}
    answer = client.post(f"/v1/pipelines/{case.kind.name}", content=tensor.array.item(), headers=headers)
    _check_unary(answer, case.kind, truth, batch=False)


def stream(client: httpx.Client, case: Case, truth: Truth, random: Random) -> None:
    """`POST /v1/pipelines/{pipeline}/stream`."""
    name, batch = _pipeline_of(case, random)
    answer = _post(client, f"/v1/pipelines/{name}/stream", body_of(case, batch=batch))
    is_late = truth.error is not None and truth.responses
    if not is_late and (_fails(case.kind, truth, batch=batch) or _omits_output(case.kind, truth)):
        assert answer.status_code == 502, answer.text[:500]
        return
    _check_events(list(_events_of(answer)), case.kind, truth, batch=batch)


def resumed_stream(client: httpx.Client, case: Case, truth: Truth, random: Random) -> None:
    """`POST /v1/streams`, read until a random event, then from there on."""
    started = _post(client, "/v1/streams", {"pipeline": case.kind.name, "inputs": body_of(case, batch=False)})
    if started.status_code == 502:
        assert _fails(case.kind, truth, batch=False)
        return
    assert started.status_code == 201, started.text[:500]
    wanted = random.randint(0, len(truth.responses))
    with client.stream("GET", started.headers["location"]) as answer:
        events = list(islice(_events_of(answer), wanted))
    rest = client.get(started.headers["location"], headers={"last-event-id": events[-1].id} if events else {})
    events += _events_of(rest) if rest.status_code == 200 else ()
    assert client.delete(started.headers["location"]).status_code == 204
    _check_events(events, case.kind, truth, batch=False)


def completion(client: httpx.Client, case: Case, truth: Truth, random: Random) -> None:
    """OpenAI's `/v1/completions`, unary and as a stream."""
    names = case.kind.pipeline["openai"]["completions"]
    request = {"model": case.kind.name, "prompt": body_of(case, batch=False)[names["prompt"]]}
    text = joined(case.kind, truth, batch=False)[names["text"]]
    assert client.post("/v1/completions", json=request).json()["choices"][0]["text"] == text
    answer = client.post("/v1/completions", json=request | {"stream": True})
    events = [event.data for event in _events_of(answer)]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text


def embeddings(client: httpx.Client, case: Case, truth: Truth, random: Random) -> None:
    """OpenAI's `/v1/embeddings`: each text of the batch has the vector that it has in Triton."""
    texts = body_of(case, batch=True)["TEXT"]
    answer = client.post("/v1/embeddings", json={"model": case.kind.name, "input": texts})
    assert [each["embedding"] for each in answer.json()["data"]] == truth.responses[0]["VECTOR"].array.tolist()


def _when_free(send: Callable[[], httpx.Response]) -> httpx.Response:
    """Sends again, as a client does, while earlier long streams keep the model busy: `/v2` waits 30 s for it."""
    ends = time.monotonic() + MOST_BUSY_S
    while (answer := send()).status_code in {429, 503, 504} and time.monotonic() < ends:
        time.sleep(1)
    return answer


def dialects_of(case: Case, *, heavy: bool) -> Iterator[Dialect]:
    """The dialects that can express the request. ``heavy``: also those for which a heavy kind takes seconds."""
    kind = case.kind
    yield oip_binary
    if kind.is_decoupled or heavy or not kind.heavy:
        yield stream
    is_single = not kind.batch or len(next(iter(case.inputs.values())).array) == 1
    if heavy or not kind.heavy:
        yield oip_json_answer
        if is_json(case):
            yield oip_json
        if is_json(case) and is_single and all(len(form.sizes) == 1 for form in kind.input_forms.values()):
            # the shape of each input follows from the number of its elements
            yield generate
            yield generate_stream
        yield pipeline
        if is_single:
            yield form
            yield resumed_stream
    if is_single and all(_is_file(case, name) for name in case.inputs):
        yield raw_body
    if kind.name == "storyteller":
        yield completion
    if kind.name == "embedder":
        yield embeddings


def oip_request(case: Case, *, binary_inputs: bool, binary_outputs: bool) -> tuple[bytes, dict[str, str]]:
    """Returns a body for `/v2`, and its headers."""
    inputs = [
        {"name": name, "datatype": tensor.datatype, "shape": tensor.shape}
        | ({"parameters": {"binary_data_size": len(tensor.raw)}} if binary_inputs else {"data": values_of(tensor)})
        for name, tensor in case.inputs.items()
    ]
    request = {"inputs": inputs, "parameters": {"binary_data_output": binary_outputs, **case.parameters}}
    raws = [tensor.raw for tensor in case.inputs.values()] if binary_inputs else []
    return with_binary(request, *raws)


def _inferred(client: httpx.Client, case: Case, *, binary_inputs: bool, binary_outputs: bool) -> httpx.Response:
    body, headers = oip_request(case, binary_inputs=binary_inputs, binary_outputs=binary_outputs)
    return client.post(f"/v2/models/{case.kind.name}/infer", content=body, headers=headers)


def _post(client: httpx.Client, path: str, body: Mapping[str, Any]) -> httpx.Response:
    """Encodes the body with orjson, which stops the other threads of the test for a tenth of the time of json."""
    return client.post(path, content=orjson.dumps(body), headers={"Content-Type": "application/json"})


def _check_json(answer: httpx.Response, case: Case, truth: Truth) -> None:
    if _is_refused(answer, case, truth):
        return
    found = {each["name"]: (each["datatype"], each["shape"], each["data"]) for each in answer.json()["outputs"]}
    assert found == {name: (each.datatype, each.shape, values_of(each)) for name, each in truth.responses[0].items()}


def _events_of(answer: httpx.Response) -> Iterator[ServerSentEvent]:
    """Reads events as the standard has it: a block that only sets `retry` is no event."""
    return (event for event in EventSource(answer).iter_sse() if event.data)


def _is_refused(answer: httpx.Response, case: Case, truth: Truth) -> bool:
    """Returns whether a unary request under `/v2` has to fail, and has: it needs exactly one response."""
    if truth.error is not None:
        assert answer.status_code in (400, 500), answer.text[:500]
        return True
    if len(truth.responses) != 1:
        assert answer.status_code == 400, answer.text[:500]
        return True
    assert answer.status_code == 200, answer.text[:500]
    return False


def _tensors_of(answer: httpx.Response) -> Tensors:
    json_bytes = int(answer.headers.get(HEADER, len(answer.content)))
    outputs, rest = json.loads(answer.content[:json_bytes])["outputs"], answer.content[json_bytes:]
    tensors = {}
    for output in outputs:
        size = output.get("parameters", {}).get("binary_data_size", 0)
        tensors[output["name"]] = Tensor.of_raw(output["datatype"], output["shape"], rest[:size])
        rest = rest[size:]
    assert not rest
    return tensors


def _check_unary(answer: httpx.Response, kind: Kind, truth: Truth, *, batch: bool) -> None:
    """A decoupled model gets one item at a time: its answer is a list of the items' answers."""
    is_listed, batch = batch and kind.is_decoupled, batch and not kind.is_decoupled
    if _fails(kind, truth, batch=batch) or _omits_output(kind, truth):
        assert answer.status_code == 502, answer.text[:500]
        return
    assert answer.status_code == 200, answer.text[:500]
    found = answer.json()
    if "early_exit" in kind.pipeline:
        assert found.pop("early_exit") == _early_exit_of(kind, truth)
    wanted = joined(kind, truth, batch=batch)
    assert found == ({name: [value] for name, value in wanted.items()} if is_listed else wanted)


def _check_events(events: list[ServerSentEvent], kind: Kind, truth: Truth, *, batch: bool) -> None:
    batch = batch and not kind.is_decoupled
    assert [event.id for event in events] == [str(number) for number in range(1, len(events) + 1)]
    last = events.pop()
    if truth.error is None and _fails(kind, truth, batch=batch):
        assert (last.event, last.json()["code"]) == ("error", "contract_violation")
        assert not events
        return
    assert {event.event for event in events} <= {"output"}
    is_error = truth.error is not None or _omits_output(kind, truth)
    assert last.event == ("error" if is_error else "done"), last.data[:500]
    if "early_exit" in kind.pipeline:
        assert last.json()["early_exit"] == _early_exit_of(kind, truth)
    outputs = [event.json() for event in events]
    wanted = [event_of(kind, response, batch=batch) for response in truth.responses]
    for name in kind.output_forms:
        found_values, wanted_values = [each[name] for each in outputs], [each[name] for each in wanted]
        if is_run_of_text(kind, name, batch=batch):
            assert "".join(found_values) == b"".join(wanted_values).decode("utf-8", "replace")
            continue
        assert found_values == wanted_values


def _fails(kind: Kind, truth: Truth, *, batch: bool) -> bool:
    """Whether a pipeline answers with an error: of the model, or for other rows or elements than a single one."""
    tensors = [item for response in truth.responses for item in response.items()]
    is_one_item = not kind.batch or batch or all(len(each.array) == 1 for _, each in tensors)
    has_several = any(name in kind.single and each.array.size > 1 for name, each in tensors) and not batch
    return truth.error is not None or not is_one_item or has_several


def _early_exit_of(kind: Kind, truth: Truth) -> str | None:
    """The rule of the table: an output is missing."""
    return EARLY_EXIT if _written(truth) != set(kind.outputs) else None


def _omits_output(kind: Kind, truth: Truth) -> bool:
    """Whether an output is missing without a rule for it. Which outputs a decoupled model writes is its own choice."""
    return not kind.is_decoupled and "early_exit" not in kind.pipeline and _written(truth) != set(kind.outputs)


def _written(truth: Truth) -> set[str]:
    return {name for response in truth.responses for name in response}


def _pipeline_of(case: Case, random: Random) -> tuple[str, bool]:
    """The pipeline for single items or for lists, and whether it is the second."""
    if not case.kind.batch:
        return case.kind.name, False
    batch = len(next(iter(case.inputs.values())).array) > 1 or random.random() < 0.5
    return case.kind.name + (BATCHED if batch else ""), batch


def _generate_body(case: Case) -> dict[str, Any]:
    inputs = {
        name: values_of(tensor)[0] if tensor.array.size == 1 else values_of(tensor)
        for name, tensor in case.inputs.items()
    }
    return inputs | dict(case.parameters)


def _generated(response: Tensors) -> dict[str, Any]:
    values = {name: values_of(tensor) for name, tensor in response.items()}
    return {name: value[0] if len(value) == 1 else value for name, value in values.items()}


def _is_file(case: Case, name: str) -> bool:
    return case.kind.kind_of(name) in ("image", "binary")
