"""The linter on a broken repository for each code, on valid repositories, and on the reference models.

Also on LLM backends, whose repositories have the files of NVIDIA's backends.
"""

import builtins
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from app.check import CheckReport, log_findings, text_of
from app.core.model import Finding
from app.lint.findings import checks, known_faults
from app.lint.linter import check
from app.pipelines.file import read_gateway_file
from app.triton.model_folder import PYTHON
from app.triton.repository import read_repository
from tests.docs.pages import ROOT
from tests.toolkit.broken_repositories import BROKEN, DECOUPLED, FLAG, VLLM, VLLM_COUNTS, Repository, engine, sound
from tests.toolkit.engine import FakeEngine
from tests.toolkit.models import model
from tests.triton.fleet.test_balancer import balanced

HEADINGS = re.findall(r"^## (.+)$", (ROOT / "docs" / "reference" / "checks.md").read_text(), re.M)
LINES = Path(__file__).with_name("findings.txt").read_text().splitlines()
"""A line of output for each code."""


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Has a few valid models."""
    repository = Repository(tmp_path / "models")
    sound(repository)
    return repository


def findings(repository: Repository, gateway: str = "") -> list[Finding]:
    """``gateway``: the text of gateway.yaml; empty: each model is a pipeline."""
    path = repository.path.parent / "gateway.yaml"
    if gateway:
        path.write_text(gateway)
    return check(read_repository(repository.path), read_gateway_file(path) if gateway else None)


def codes(found: list[Finding]) -> list[str]:
    return [finding.code for finding in found]


def test_every_code_has_a_section_and_a_broken_repository() -> None:
    own = checks().keys() - known_faults().faults
    assert sorted(HEADINGS) == sorted(own)
    assert set(BROKEN) == own - {
        "other-signature",
        "coalescing",
    }  # they need several Tritons, and a running gateway


@pytest.mark.parametrize("code", BROKEN)
def test_a_broken_repository_has_exactly_one_finding_which_is_printed(
    code: str, repository: Repository, tmp_path: Path
) -> None:
    BROKEN[code].build(repository)
    found = findings(repository, BROKEN[code].gateway)
    assert codes(found) == [code]
    line = text_of(CheckReport(0, None, found), "text").splitlines()[1]
    assert line.replace(f"{tmp_path}/", "").replace(f"as Python {PYTHON}", "as Python 3.11") in LINES


def test_pipelines_over_an_unreadable_model_have_no_finding_of_their_own(repository: Repository) -> None:
    """The model has one finding, and no name of another model is suggested for it."""
    file = "pipelines:\n  p: {model: broken}\n  q: {model: ident, rejects_input: [broken]}\noip: {models: [broken]}\n"
    repository.write("broken", "name: {")
    (finding,) = findings(repository, file)
    assert (finding.code, finding.model) == ("unreadable-config", "broken")


@pytest.fixture
def pictures(repository: Repository) -> Repository:
    repository.model("pictures", "X:STRING:1", "Y:FP32:4")
    return repository


PICTURE = """
    inputs: {image: {tensor: X, kind: image}}
    contract: {Y: {shape: [-1]}}
    sample:
      image: picture.png
"""


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (PICTURE, "gateway.yaml:7: pipelines.p.sample.image names a file that cannot be read"),
        (
            PICTURE.replace("      image:", "      imgae:"),
            "sample.imgae is not a field of the pipeline; did you mean 'image'?",
        ),
        (PICTURE.replace("sample:", "sample: {}").replace("      image: picture.png\n", ""), "sample.image is"),
        (PICTURE.replace("picture.png", "gateway.yaml"), "gateway.yaml:7: pipelines.p.sample.image"),
        (PICTURE.replace("picture.png", "[1]"), "gateway.yaml:6: pipelines.p.sample cannot be sent"),
        (PICTURE.replace("shape: [-1]", "shape: [-1, 2]"), ":5: pipelines.p.contract.Y.shape is [-1,2], and the"),
        (PICTURE.replace("shape: [-1]", "shape: [3]"), "contract.Y.shape is [3], and the model's output 'Y' is [4]"),
    ],
)
def test_samples_and_contracts_are_checked(pictures: Repository, keys: str, expected: str) -> None:
    (finding,) = findings(pictures, f"pipelines:\n  p:\n    model: pictures{keys}")
    assert expected in finding.text


def test_each_example_is_checked_like_the_sample(pictures: Repository, tmp_path: Path) -> None:
    (tmp_path / "light.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    examples = "\n    examples:\n      light: {image: light.png}\n      dark: {image: absent.png}\n"
    gateway = f"pipelines:\n  p:\n    model: pictures\n    inputs: {{image: {{tensor: X, kind: image}}}}{examples}"
    (finding,) = findings(pictures, gateway)
    assert finding.code == "sample"
    assert "gateway.yaml:7: pipelines.p.examples.dark.image names a file that cannot be read" in finding.text


def test_the_file_of_a_sample_is_read_once(
    pictures: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may have 64 MiB."""
    opened: list[str] = []
    real_open = builtins.open

    def counting(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(Path(path).name)
        return real_open(path, *args, **options)

    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    monkeypatch.setattr(builtins, "open", counting)
    gateway = f"pipelines:\n  p:\n    model: pictures{PICTURE.replace('contract: {Y: {shape: [-1]}}', '')}"
    assert findings(pictures, gateway) == []
    assert opened.count("picture.png") == 1


def test_scripts_of_a_model_are_parsed_but_not_executed(repository: Repository, tmp_path: Path) -> None:
    repository.model("broken", "X", "Y", script=f"open('{tmp_path}/executed', 'w')")
    (repository.path / "broken" / "1" / "words.py").write_text("def words(\n")
    (repository.path / "broken" / "1" / "old.py").write_text('PATTERN = "\\d"\n')
    (finding,) = findings(repository)
    assert finding.code == "script-syntax"
    assert finding.text.startswith(f"{tmp_path}/models/broken/1/words.py:1: '(' was never closed, as Python 3.")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("steps", "rejects", "found_steps"),
    [
        (("gate X=X > Y=a", "ident X=a > Y=Y"), "gate", []),
        (("gate X=X > Y=Y", "ident X=X > Y=Z"), "gate", [1]),
        (("gate X=X > Y=a", "ident X=a > Y=Y", "ident X=a > Y=Z"), "gate", []),
        (("ident X=X > Y=a", "gate X=a > Y=Y", "ident X=a > Y=b", "ident X=b > Y=Z"), "gate", [2]),
        (("inner X=X > Y=Y", "ident X=X > Y=Z"), "gate", [1]),
        (("ident X=X > Y=Y", "full X=X > Y=Z"), "", [2]),
    ],
)
def test_a_step_that_may_fail_must_not_run_in_parallel(
    repository: Repository, steps, rejects: str, found_steps: list[int]
) -> None:
    repository.model("gate", "X", "Y")
    repository.model("full", "X", "Y", "dynamic_batching { default_queue_policy { max_queue_size: 4 } }")
    repository.ensemble("inner", "X", "Y", "gate X=X > Y=Y")
    outputs = "Y Z" if any("=Z" in step for step in steps) else "Y"
    repository.ensemble("broken", "X", outputs, *steps)
    found = findings(repository, f"pipelines: {{p: {{model: broken, rejects_input: [{rejects}]}}}}\n")
    assert [(each.code, each.step) for each in found] == [("parallel-failure", step) for step in found_steps]


DYNAMIC = "dynamic_batching {}"
COALESCED = ", idempotent: true, sample: {x: [1.0, 2.0]}, coalesce: true"


@pytest.mark.parametrize(
    ("rest", "batch", "keys", "found"),
    [
        ("", 8, "", ["broken"]),
        (DYNAMIC, 8, "", []),
        ("", 8, COALESCED, []),
        ("", 1, "", []),
        (DECOUPLED, 8, "", []),
        ("sequence_batching { iterative_sequence: true }", 8, "", []),
    ],
)
def test_a_model_that_gets_batches_of_one_has_a_hint(
    repository: Repository, rest: str, batch: int, keys: str, found: list[str]
) -> None:
    repository.model("broken", "X:FP32:2", "Y:FP32:2", rest, batch=batch)
    fields = "inputs: {x: {tensor: X}}, outputs: {y: {tensor: Y}}"
    hints = findings(repository, f"pipelines: {{p: {{model: broken, {fields}{keys}}}}}\n")
    assert [(each.code, each.model) for each in hints] == [("batches-of-one", model) for model in found]


def test_the_parts_of_a_batch_are_compared_with_the_smallest_step(repository: Repository) -> None:
    repository.model("many", "X", "Y", DYNAMIC, batch=8)
    repository.model("few", "X", "Y", DYNAMIC, batch=2)
    repository.ensemble("both", "X", "Y", "many X=X > Y=t", "few X=t > Y=Y", batch=8)
    found = findings(repository, "pipelines:\n  p: {model: both, batch: {parts: 4}}\n")
    texts = [each.text for each in found if each.code == "gateway-yaml"]
    assert [text.partition(": pipelines.p.")[2] for text in texts] == [
        "batch.parts is 4, and the model takes 2 items at a time"
    ]


def test_the_hint_names_the_step_of_an_ensemble(repository: Repository) -> None:
    repository.model("joined", "X", "Y", DYNAMIC, batch=8)
    repository.model("alone", "X", "Y", batch=8)
    repository.ensemble("both", "X", "Y", "joined X=X > Y=t", "alone X=t > Y=Y", batch=8)
    (hint,) = findings(repository, "pipelines: {p: {model: both}}\n")
    assert (hint.code, hint.model, hint.pipeline) == ("batches-of-one", "alone", "p")


@pytest.mark.parametrize(("keys", "found"), [("", ["alone"]), (", each: X", [])])
def test_the_hint_names_the_model_of_a_step_that_gets_no_rows_of_each(
    repository: Repository, keys: str, found: list[str]
) -> None:
    repository.model("alone", "X", "Y", batch=8)
    hints = findings(repository, f"pipelines: {{p: {{steps: {{a: {{model: alone, inputs: {{X: X}}{keys}}}}}}}}}\n")
    assert [(each.code, each.model) for each in hints] == [("batches-of-one", model) for model in found]


def test_the_reference_models_have_no_findings(pytestconfig: pytest.Config) -> None:
    repository = read_repository(pytestconfig.rootpath / "triton_models")
    assert check(repository, read_gateway_file(pytestconfig.rootpath / "gateway.yaml")) == []


OMITS = 'parameters { key: "may_omit" value { string_value: "Y" } }'
CALLS = 'parameters {{ key: "bls_calls" value {{ string_value: "{}" }} }}'
TWO_OUTPUTS = ("model", "both", "X", "P Q", DECOUPLED)
DECOUPLED_INSIDE = ("ensemble", "inner", "X", "Y", "tokens X=X > Y=Y")
PLAIN = ("model", "plain", "X:FP32:-1,4", "Y:FP32:-1,4")


def chain(*steps: str, outputs: str = "Y") -> tuple[str, ...]:
    return ("ensemble", "chain", "X", outputs, *steps)


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ([], []),
        # outputs of one decoupled step may be joined, and with no others
        ([chain("tokens X=X > Y=a", "ident X=a > Y=Y")], []),
        ([chain("ident X=X > Y=a", "tokens X=a > Y=Y")], []),
        ([chain("tokens X=X > Y=a", "tokens X=a > Y=Y")], []),
        ([TWO_OUTPUTS, chain("both X=X > P=p Q=q", "ident X=p > Y=r", "join A=r B=q > Y=Y")], []),
        ([chain("ident X=X > Y=p", "tokens X=p > Y=t", "join A=t B=p > Y=Y")], [("decoupled-join", 3, "p")]),
        ([chain("ident X=X > Y=Z", "tokens X=Z > Y=Y", outputs="Y Z")], [("decoupled-join", None, "Z")]),
        ([chain("tokens X=X > Y=t", "tokens X=t > Y=u", "join A=t B=u > Y=Y")], [("decoupled-join", 3, "u")]),
        ([DECOUPLED_INSIDE, chain("inner X=X > Y=t", "join A=t B=X > Y=Y")], [("decoupled-join", 2, "X")]),
        # ensembles, and scripts through an ensemble, that call each other
        (
            [("ensemble", "one", "X", "Y", "two X=X > Y=Y"), ("ensemble", "two", "X", "Y", "one X=X > Y=Y")],
            [("cycle", None, None)],
        ),
        (
            [
                ("model", "script", "X", "Y", CALLS.format("ident, chain")),
                ("model", "other", "X", "Y", CALLS.format("script")),
                chain("other X=X > Y=Y"),
            ],
            [("bls-cycle", None, None)],
        ),
        # an output that may be left out, for an optional input and behind a nested ensemble
        (
            [
                ("model", "shy", "X", "Y", OMITS),
                ("model", "patient", "A B:FP32:-1:optional", "Y"),
                chain("shy X=X > Y=t", "patient A=X B=t > Y=Y"),
            ],
            [],
        ),
        (
            [
                ("model", "shy", "X", "Y", OMITS),
                ("ensemble", "inner", "X", "Y", "shy X=X > Y=Y"),
                chain("inner X=X > Y=t", "ident X=t > Y=Y"),
            ],
            [("omitted-input", 2, "t")],
        ),
        # batch dimensions of the ensemble and its step
        ([PLAIN, ("ensemble", "chain", "X:FP32:4", "Y:FP32:4", "plain X=X > Y=Y", 4)], []),
        ([("model", "flat", "X", "Y"), (*chain("flat X=X > Y=Y"), 4)], [("batch-mismatch", 1, "X")]),
        ([("model", "flat", "X", "Y"), (*chain("flat X=X > Y=Y"), 1)], []),
        ([("model", "batching", "X", "Y", 4), (*chain("batching X=X > Y=Y"), 0)], []),
        (
            [chain("ident X=X > Y=Y", "ident X=Y > Y=Z", "fork X=Z > P=X", outputs="Y Z")],
            [("written-twice", 3, "X"), ("cycle", 1, None)],
        ),
    ],
    ids=str,
)
def test_the_findings_of_a_repository(repository: Repository, added: list[Any], expected: list[Any]) -> None:
    """``added``: to the valid models; a number at the end is ``max_batch_size``."""
    for kind, *given in added:
        batch = {"batch": given.pop()} if isinstance(given[-1], int) else {}
        getattr(repository, kind)(*given, **batch)
    assert [(each.code, each.step, each.tensor) for each in findings(repository)] == expected


def test_models_listed_under_oip_must_exist(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("pipelines: {p: {model: text_embed}}\noip:\n  models: [text_embed, text_generat]\n")
    (finding,) = check(read_repository(pytestconfig.rootpath / "triton_models"), read_gateway_file(config))
    assert (finding.code, finding.model) == ("gateway-yaml", "text_generat")
    assert "gateway.yaml:3: oip.models.1 'text_generat' is not a model in the repository" in finding.text
    assert "did you mean 'text_generate'" in finding.text


@pytest.mark.parametrize(("models", "place"), [("[{}]", "oip.models.0"), ("all", "oip.models")])
def test_a_pipeline_with_steps_hides_a_model_with_its_name(repository: Repository, models: str, place: str) -> None:
    """Both would have one address under /v2, and one queue. Without a model of this name, there is no finding."""
    for name in ("fork", "chain"):
        text = f"pipelines: {{{name}: {{steps: {{one: {{model: ident, inputs: {{X: X}}}}}}}}}}\n"
        found = findings(repository, f"{text}oip: {{models: {models.format(name)}}}\n")
        hides = f"{place} 'fork' is also a pipeline with steps, which hides the model: rename the pipeline"
        assert [hides in each.text for each in found if each.code == "gateway-yaml"] == [True] * (name == "fork")


async def test_a_different_signature_at_one_triton_is_a_finding(caplog: pytest.LogCaptureFixture) -> None:
    usual, other = model("X FP32 [1]", "Y FP32 [1]", name="m"), model("X FP32 [2]", "Y FP32 [1]", name="m")
    balancer, _ = balanced(FakeEngine.of(usual), FakeEngine.of(other), FakeEngine.of(usual))
    with caplog.at_level(logging.ERROR):
        await log_findings(balancer, None)
    found = [record for record in caplog.records if getattr(record, "code", "") == "other-signature"]
    assert [(record.__dict__["model"], "triton-1:1" in record.message) for record in found] == [("m", True)]


TWO = "instance_group [ { kind: KIND_CPU count: 2 } ]"


def ensemble_of_engine(
    repository: Repository, rest_of_postprocessing: str = "", rest_of_engine: str = DECOUPLED
) -> None:
    """TensorRT-LLM's ensemble, with few of its tensors."""
    tokens = "IDS:INT32:-1"
    repository.model("preprocessing", "QUERY:STRING:1 WORDS:STRING:-1:optional LENGTH:INT32:1", tokens)
    repository.model("tensorrt_llm", "input_ids:INT32:-1", "output_ids:INT32:-1", rest_of_engine)
    repository.model("postprocessing", "TOKENS:INT32:-1", "OUTPUT:STRING", rest_of_postprocessing)
    repository.ensemble(
        "ensemble",
        "text_input:STRING:1 max_tokens:INT32:1 stop_words:STRING:-1:optional",
        "text_output:STRING",
        "preprocessing QUERY=text_input WORDS=stop_words LENGTH=max_tokens > IDS=ids",
        "tensorrt_llm input_ids=ids > output_ids=tokens",
        "postprocessing TOKENS=tokens > OUTPUT=text_output",
    )


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("vllm", "the preset vllm uses 'return_finish_reason' and 'finish_reason', which the model does not have"),
        ("tensorrt_llm", "; the model has the tensors of the preset vllm"),
    ],
)
def test_a_declared_preset_is_compared_with_the_model(repository: Repository, preset: str, expected: str) -> None:
    BROKEN["preset-mismatch"].build(repository)
    found = findings(repository, f"pipelines: {{llm: {{model: broken, preset: {preset}}}}}\n")
    (mismatch,) = (each for each in found if each.code == "preset-mismatch")
    assert expected in mismatch.text
    assert (mismatch.model, mismatch.pipeline) == ("broken", "llm")


def test_a_tensor_of_another_name_can_be_declared(repository: Repository) -> None:
    outputs = "text_output:STRING logprobs:STRING num_input_tokens:UINT32:1 num_output_tokens:UINT32 WHY:STRING"
    repository.model("llm", f"{VLLM} {VLLM_COUNTS} tell_why:{FLAG}", outputs, DECOUPLED)
    fields = "parameters: {return_finish_reason: {tensor: tell_why}}, outputs: {finish_reason: {tensor: WHY}}"
    pipelines = "pipelines: {{llm: {{model: llm, preset: vllm{}}}}}\n"
    assert codes(findings(repository, pipelines.format(""))) == ["preset-mismatch"]
    assert findings(repository, pipelines.format(f", {fields}")) == []


@pytest.mark.parametrize("given", ["decoupled: False", "decoupled: True"])
def test_the_llm_api_model_streams_as_its_model_yaml_says(repository: Repository, given: str) -> None:
    BROKEN["not-decoupled"].build(repository)
    text = f"model: TinyLlama\nbackend: pytorch\ntriton_config:\n  max_batch_size: 0\n  {given}\n"
    (repository.path / "broken" / "1" / "model.yaml").write_text(text)
    assert codes(findings(repository)) == (["not-decoupled"] if "False" in given else [])


@pytest.mark.parametrize("text", ["triton_config: [", "- a", "triton_config: {decoupled: maybe}", "", "\xff"])
def test_a_model_yaml_of_another_kind_is_ignored(repository: Repository, text: str) -> None:
    BROKEN["not-decoupled"].build(repository)
    (repository.path / "broken" / "1" / "model.yaml").write_bytes(text.encode("latin-1"))
    assert codes(findings(repository)) == ["not-decoupled"]


def test_a_pipeline_without_streams_needs_no_decoupled_model(repository: Repository) -> None:
    BROKEN["not-decoupled"].build(repository)
    keys = "model: broken, preset: tensorrt_llm_api"
    assert findings(repository, f"pipelines: {{llm: {{{keys}, stream: false}}}}\n") == []
    assert codes(findings(repository, f"pipelines: {{llm: {{{keys}}}}}\n")) == ["not-decoupled"]


@pytest.mark.parametrize(
    ("accumulates", "expected"),
    [("", ["split-characters"]), ("false", ["split-characters"]), ("${accumulate_tokens}", ["split-characters"])]
    + [(each, list[str]()) for each in ("true", "True", "yes", "1", "t")],
)
def test_a_script_must_accumulate_tokens(repository: Repository, accumulates: str, expected: list[str]) -> None:
    """The values are those that the script of ``tensorrt_llm_bls`` knows."""
    engine("tensorrt_llm_bls", accumulate_tokens=accumulates)(repository)
    assert codes(findings(repository)) == expected


def test_a_script_that_does_not_stream_may_decode_at_once(repository: Repository) -> None:
    engine("tensorrt_llm_bls", decoupled=False)(repository)
    assert codes(findings(repository)) == ["not-decoupled"]
    assert (
        findings(repository, "pipelines: {llm: {model: tensorrt_llm_bls, stream: false, preset: tensorrt_llm}}\n") == []
    )


def test_the_ensemble_splits_characters(repository: Repository) -> None:
    ensemble_of_engine(repository)
    found = [each for each in findings(repository) if each.code != "preset-mismatch"]
    assert codes(found) == ["split-characters"]
    assert found[0].text.endswith("use tensorrt_llm_bls with accumulate_tokens: true")


def test_the_ensemble_mixes_tokens_with_several_instances_of_postprocessing(repository: Repository) -> None:
    ensemble_of_engine(repository, TWO)
    found = findings(repository)
    assert [(each.model, each.step) for each in found if each.code == "unordered-stream"] == [("ensemble", 3)]


def test_the_ensemble_over_an_engine_that_is_not_decoupled_cannot_stream(repository: Repository) -> None:
    ensemble_of_engine(repository, TWO, "")
    assert set(codes(findings(repository))) == {"preset-mismatch", "not-decoupled"}


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [('key: "ENABLE_VLLM_HEALTH_CHECK" value { string_value: "True" }', []), ('key: "a"', ["no-health-check"])],
)
@pytest.mark.parametrize("backend", ['backend: "vllm"', ""])
def test_a_vllm_model_checks_its_engine(
    repository: Repository, backend: str, parameter: str, expected: list[str]
) -> None:
    """Without ``backend``, Triton chooses it by the file model.json."""
    repository.write("llm", f'name: "llm"\n{backend}\nparameters {{ {parameter} }}')
    (repository.path / "llm" / "1" / "model.json").write_text(json.dumps({"model": "facebook/opt-125m"}))
    assert codes(findings(repository)) == expected


def test_a_pipeline_over_an_auto_completed_model_is_not_checked(repository: Repository) -> None:
    repository.write("llm", 'name: "llm"\nbackend: "vllm"\nparameters { key: "ENABLE_VLLM_HEALTH_CHECK" }')
    found = findings(repository, "pipelines: {llm: {model: llm, preset: vllm}}\n")
    assert codes(found) == ["no-health-check", "unknown-edge"]
    assert found[1].text == (
        "pipeline 'llm' relies on auto-completion: its fields are not checked (to check them, use --triton)"
    )
    found = findings(repository, "pipelines: {p: {steps: {a: {model: llm, inputs: {X: X}}}}}\n")
    assert (codes(found), found[1].model) == (["no-health-check", "unknown-edge"], "llm")
