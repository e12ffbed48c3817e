"""Which pipelines can have sessions, and their terms."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.api.sessions.open_sessions import new_sequence_id, terms_of
from app.core.errors import InvalidRequest
from app.core.model import ModelConfig, SequenceBatching, sequence_ids_of
from app.core.share import WHOLE, Share
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.spec import PipelineSpec
from app.sessions.session_terms import OWN_NUMBERS, OWN_SHORT_NUMBERS, OWN_TEXT
from tests.toolkit.models import ensemble, model, pipeline


def stateful(datatype: str = "UINT64", name: str = "m", **more: Any) -> ModelConfig:
    sequence = SequenceBatching(datatype, **{"idle_s": 60.0, **more.pop("sequence", {})})
    return model("X FP32 [1]", "Y FP32 [1]", name=name, sequence=sequence, **more)


EXCLUDED: dict[str, Any] = {
    "batch": True,
    "coalesce": True,
    "idempotent": True,
    "cancel": {"model": "m", "input": "X"},
    "openai": {"completions": {"prompt": "X", "text": "Y"}},
}


@pytest.mark.parametrize("key", EXCLUDED)
def test_a_session_excludes_keys_that_change_how_a_request_runs(key: str) -> None:
    with pytest.raises(ValidationError, match=f"has session, which excludes {key}"):
        PipelineSpec.model_validate({"model": "m", "session": True, key: EXCLUDED[key]})


REFUSED = {
    "no sequence": (model("X FP32 [1]", "Y FP32 [1]", name="m"), "no model that a request runs through"),
    "iterative": (stateful(sequence={"is_iterative": True}), "needs no session"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_models_without_sequences_of_callers_are_refused(reason: str) -> None:
    config, text = REFUSED[reason]
    with pytest.raises(PipelineMismatch, match=text) as caught:
        pipeline(config, session=True)
    assert caught.value.location == ("session",)


def test_end_inputs_must_be_a_valid_request() -> None:
    with pytest.raises(PipelineMismatch, match="is not a valid request: 'X'") as caught:
        pipeline(stateful(), session={"end_inputs": {"X": "text"}})
    assert caught.value.location == ("session", "end_inputs")
    terms = terms_of(pipeline(stateful(), session={"end_inputs": {"X": 0}}))
    assert terms is not None
    assert terms.spec.end_inputs == {"X": 0}


@pytest.mark.parametrize(
    ("config", "slots"),
    [
        (stateful(), 1),
        (stateful(max_batch_size=8, instance_count=2), 16),
        (stateful(max_batch_size=8, instance_count=2, sequence={"candidates": 3}), 6),
    ],
)
def test_the_places_of_a_model(config: ModelConfig, slots: int) -> None:
    terms = terms_of(pipeline(config, session=True))
    assert terms is not None
    assert (terms.slots, terms.longest_idle_s) == ({"m": slots}, 60.0)
    assert (terms.spec.idle_s, terms.spec.max_s, terms.triton_idle_s) == (30.0, 600.0, 60.0)


def test_the_stateful_steps_of_an_ensemble_count() -> None:
    below = stateful(name="below", sequence={"idle_s": 5.0})
    terms = terms_of(pipeline(ensemble("outer", below), below, session=True))
    assert terms is not None
    assert list(terms.slots) == ["below"]
    assert terms.triton_idle_s == 5.0


def test_requests_are_only_steps_of_sessions() -> None:
    compiled = pipeline(stateful(), session=True)
    with pytest.raises(InvalidRequest) as caught:
        compiled.request_of_json(b'{"X": 1}')
    assert "/v1/pipelines/p/sessions" in str(caught.value.hint)
    assert compiled.of_sequence().request_of_json(b'{"X": 1}').parameters == {}
    assert compiled.probe_of(b'{"X": 1}').parameters == {}


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    ("datatype", "numbers"),
    [("UINT64", OWN_NUMBERS), ("INT64", OWN_NUMBERS), ("UINT32", OWN_SHORT_NUMBERS), ("INT32", OWN_SHORT_NUMBERS)],
)
def test_numbers_fit_the_control_and_belong_to_one_worker(datatype: str, numbers: range, number: int) -> None:
    ids = sequence_ids_of(stateful(datatype), {})
    made = {new_sequence_id(ids, Share(number, 3)) for _ in range(200)}
    assert len(made) > 190
    for each in made:
        ids.check(each)
        assert each in numbers
        assert (int(each) - numbers.start) % 3 == number - 1


def test_texts_have_the_length_that_triton_reads() -> None:
    ids = sequence_ids_of(stateful("BYTES"), {})
    made = {new_sequence_id(ids, WHOLE) for _ in range(10)}
    assert len(made) == 10
    for each in made:
        ids.check(each)
        assert (len(str(each)), str(each).startswith(OWN_TEXT)) == (128, True)
