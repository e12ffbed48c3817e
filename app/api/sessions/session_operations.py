"""Describes sessions in the OpenAPI document, and generates calls of a pipeline with sessions."""

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import TypedDict

from app.api.openapi import (
    COUNT,
    INFERENCE_ERRORS,
    TIMEOUT_HEADER,
    Operation,
    Visible,
    answer,
    answer_headers,
    header,
    in_path,
    json_answer,
)
from app.api.pipelines.pipeline_operations import content_of, events_answer, links, output_of, request_of, result_of
from app.api.pipelines.samples import KEY, NO_KEY, javascript_call, parts_of
from app.core import errors
from app.core.json import TEXT, Schema, enum_of, one_of
from app.pipelines.pipeline import Pipeline
from app.sessions.session_errors import HttpSessionsOff, SessionLost, StepOutOfTurn, UnknownSession

ANSWER_HEADERS = answer_headers(
    ("X-Session-Step", "The number of the last answered step of the session", True, COUNT),
    (
        "X-Session-Expires-In",
        "Seconds until the session expires without a further step",
        False,
        {"type": "number", "minimum": 0},
    ),
)
_STEP_HEADERS = (
    header(
        "X-Session-Step",
        {"type": "integer", "minimum": 1, "maximum": 10**15 - 1},
        "The number of the step, from 1: a repeated step gets the first answer again.",
    ),
    header("X-Session-End", enum_of(["true", "false"]), "`true`: the last step of the session"),
)
_ID = in_path("id", TEXT)


class SessionOpened(TypedDict):
    id: str
    url: str
    expires_in_s: float


def open_session(visible: Visible) -> Iterator[Operation]:
    possible = (
        *(errors.UnknownPipeline, errors.TooManyRequests),
        *(errors.ModelNotReady, errors.UpstreamUnavailable, errors.Draining, HttpSessionsOff),
    )
    opened = json_answer("The session is open", SessionOpened, "Location") | links("run_step", "delete_session")
    for each in _stateful(visible):
        summary = each.spec.description or f"Open a session of {each.spec.model}"
        yield Operation(
            f"open_session_{each.name}", each.name, {201: opened}, possible, path=each.name, summary=summary
        )


def run_step(visible: Visible) -> Iterator[Operation]:
    if stateful := _stateful(visible):
        results = one_of([*map(result_of, stateful)], "anyOf")
        ok = json_answer("The outputs of the session's pipeline", results, *ANSWER_HEADERS)
        yield _step("run_step", stateful, ok)


def stream_step(visible: Visible) -> Iterator[Operation]:
    if streaming := [each for each in _stateful(visible) if each.spec.stream is not None]:
        yield _step(
            "stream_step", streaming, events_answer(one_of([*map(output_of, streaming)], "anyOf"), "X-Session-Step")
        )


def delete_session(visible: Visible) -> Iterator[Operation]:
    if _stateful(visible):
        ended = {204: answer("The session has ended")}
        yield Operation("delete_session", "sessions", ended, (UnknownSession, SessionLost), [_ID])


def _stateful(visible: Visible) -> Sequence[Pipeline]:
    return [each for each in visible.pipelines if not each.spec.takes_requests]


def _step(name: str, pipelines: Sequence[Pipeline], ok: Schema) -> Operation:
    content = {name: each for pipeline in pipelines for name, each in content_of(pipeline).items()}
    content["application/json"] = {"schema": one_of([*map(request_of, pipelines)], "anyOf")}
    possible = (UnknownSession, SessionLost, StepOutOfTurn, *INFERENCE_ERRORS)
    return Operation(name, "sessions", {200: ok}, possible, [_ID, TIMEOUT_HEADER, *_STEP_HEADERS], content)


def session_samples(pipeline: Pipeline, base_url: str, *, with_key: bool) -> dict[str, str]:
    """A session with one step, which is its last."""
    opening, key, parts = (
        f"{base_url}/v1/pipelines/{pipeline.name}/sessions",
        KEY if with_key else NO_KEY,
        parts_of(pipeline),
    )
    read_url = shlex.quote('import json, sys; print(json.load(sys.stdin)["url"])')
    is_last = {"X-Session-End": '"true"'}
    client = ", ".join(filter(None, [f"base_url={base_url!r}", key.python]))
    return {
        "curl": f"session=$(curl -s -X POST {shlex.quote(opening)}{key.curl} | python3 -c {read_url})\n"
        f"{parts.curl_pipe}curl -H 'X-Session-End: true' {shlex.quote(base_url)}$session{key.curl} {parts.curl}",
        "javascript": f"{parts.imports}{parts.before}"
        + javascript_call("opened", json.dumps(opening), key.headers)
        + f"const url = {json.dumps(base_url)} + (await opened.json()).url;\n"
        + javascript_call("response", "url", is_last | parts.headers | key.headers, parts.body)
        + "console.log(await response.json());",
        "python": f"{key.python_import}import httpx\n\nwith httpx.Client({client}) as client:\n"
        f'    url = client.post({opening!r}).raise_for_status().json()["url"]\n'
        f'    step = client.post(url, {parts.python}, headers={{"X-Session-End": "true"}})\n'
        "    print(step.raise_for_status().json())",
    }
