"""The linter on a broken repository for each code, on valid repositories, and on the reference models."""

import builtins
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from app.check import CheckReport, log_findings, text_of
from app.lint.findings import Finding, checks
from app.lint.linter import check
from app.pipelines.file import read_gateway_file
from app.triton.model_folder import PYTHON
from app.triton.repository import read_repository
from tests.docs.pages import ROOT
from tests.toolkit.broken_repositories import BROKEN, DECOUPLED, Broken, Repository, sound
from tests.toolkit.engine import FakeEngine
from tests.toolkit.models import model
from tests.triton.fleet.test_balancer import balanced

HEADINGS = re.findall(r"^## (.+)$", (ROOT / "docs" / "reference" / "checks.md").read_text(), re.M)
LINES = Path(__file__).with_name("findings.txt").read_text().splitlines()
"""A line of output for each code."""


def findings_of(broken: Broken, path: Path) -> list[Finding]:
    config = broken.write(path)
    return check(read_repository(path / "models"), read_gateway_file(config) if config else None)


def test_every_code_has_a_section_and_a_broken_repository() -> None:
    assert sorted(HEADINGS) == sorted(checks())
    assert set(BROKEN) == set(checks()) - {
        "other-signature",
        "coalescing",
    }  # they need several Tritons, and a running gateway


@pytest.mark.parametrize("code", BROKEN)
def test_a_broken_repository_has_exactly_one_finding_which_is_printed(code: str, tmp_path: Path) -> None:
    found = findings_of(BROKEN[code], tmp_path)
    assert [finding.code for finding in found] == [code]
    line = text_of(CheckReport(0, None, found), "text").splitlines()[1]
    assert line.replace(f"{tmp_path}/", "").replace(f"as Python {PYTHON}", "as Python 3.11") in LINES


def test_pipelines_over_an_unreadable_model_have_no_finding_of_their_own(tmp_path: Path) -> None:
    """The model has one finding, and no name of another model is suggested for it."""
    file = "pipelines:\n  p: {model: broken}\n  q: {model: ident, rejects_input: [broken]}\noip: {models: [broken]}\n"
    repository = Broken(lambda repository: repository.write("broken", "name: {"), refused=True, gateway=file)
    (finding,) = findings_of(repository, tmp_path)
    assert (finding.code, finding.model) == ("unreadable-config", "broken")


def pictures(repository: Repository) -> None:
    repository.model("pictures", "X:STRING:1", "Y:FP32:4")


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
def test_samples_and_contracts_are_checked(tmp_path: Path, keys: str, expected: str) -> None:
    gateway = f"pipelines:\n  p:\n    model: pictures{keys}"
    (finding,) = findings_of(Broken(pictures, refused=False, gateway=gateway), tmp_path)
    assert expected in finding.text


def test_each_example_is_checked_like_the_sample(tmp_path: Path) -> None:
    (tmp_path / "light.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    examples = "\n    examples:\n      light: {image: light.png}\n      dark: {image: absent.png}\n"
    gateway = f"pipelines:\n  p:\n    model: pictures\n    inputs: {{image: {{tensor: X, kind: image}}}}{examples}"
    (finding,) = findings_of(Broken(pictures, refused=False, gateway=gateway), tmp_path)
    assert finding.code == "sample"
    assert "gateway.yaml:7: pipelines.p.examples.dark.image names a file that cannot be read" in finding.text


def test_the_file_of_a_sample_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may have 64 MiB."""
    opened: list[str] = []
    real_open = builtins.open

    def counting(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(Path(path).name)
        return real_open(path, *args, **options)

    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    monkeypatch.setattr(builtins, "open", counting)
    gateway = f"pipelines:\n  p:\n    model: pictures{PICTURE.replace('contract: {Y: {shape: [-1]}}', '')}"
    assert findings_of(Broken(pictures, refused=False, gateway=gateway), tmp_path) == []
    assert opened.count("picture.png") == 1


def test_scripts_of_a_model_are_parsed_but_not_executed(tmp_path: Path) -> None:
    def build(repository: Repository) -> None:
        repository.model("broken", "X", "Y", script=f"open('{tmp_path}/executed', 'w')")
        (repository.path / "broken" / "1" / "words.py").write_text("def words(\n")
        (repository.path / "broken" / "1" / "old.py").write_text('PATTERN = "\\d"\n')

    (finding,) = findings_of(Broken(build, refused=False), tmp_path)
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
    tmp_path: Path, steps, rejects: str, found_steps: list[int]
) -> None:
    def build(repository: Repository) -> None:
        repository.model("gate", "X", "Y")
        repository.model("full", "X", "Y", "dynamic_batching { default_queue_policy { max_queue_size: 4 } }")
        repository.ensemble("inner", "X", "Y", "gate X=X > Y=Y")
        outputs = "Y Z" if any("=Z" in step for step in steps) else "Y"
        repository.ensemble("broken", "X", outputs, *steps)

    gateway = f"pipelines: {{p: {{model: broken, rejects_input: [{rejects}]}}}}\n"
    found = findings_of(Broken(build, refused=False, gateway=gateway), tmp_path)
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
def test_a_model_whose_requests_nobody_joins_has_a_hint(
    tmp_path: Path, rest: str, batch: int, keys: str, found: list[str]
) -> None:
    def build(repository: Repository) -> None:
        repository.model("broken", "X:FP32:2", "Y:FP32:2", rest, batch=batch)

    fields = "inputs: {x: {tensor: X}}, outputs: {y: {tensor: Y}}"
    gateway = f"pipelines: {{p: {{model: broken, {fields}{keys}}}}}\n"
    hints = findings_of(Broken(build, refused=False, gateway=gateway), tmp_path)
    assert [(each.code, each.model) for each in hints] == [("batches-of-one", model) for model in found]


def test_the_hint_names_the_step_of_an_ensemble(tmp_path: Path) -> None:
    def build(repository: Repository) -> None:
        repository.model("joined", "X", "Y", DYNAMIC, batch=8)
        repository.model("alone", "X", "Y", batch=8)
        repository.ensemble("both", "X", "Y", "joined X=X > Y=t", "alone X=t > Y=Y", batch=8)

    (hint,) = findings_of(Broken(build, refused=False, gateway="pipelines: {p: {model: both}}\n"), tmp_path)
    assert (hint.code, hint.model, hint.pipeline) == ("batches-of-one", "alone", "p")


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
def test_the_findings_of_a_repository(tmp_path: Path, added: list[Any], expected: list[Any]) -> None:
    """``added``: to a valid repository; a number at the end is ``max_batch_size``."""
    repository = Repository(tmp_path)
    sound(repository)
    for kind, *given in added:
        batch = {"batch": given.pop()} if isinstance(given[-1], int) else {}
        getattr(repository, kind)(*given, **batch)
    assert [(each.code, each.step, each.tensor) for each in check(read_repository(tmp_path))] == expected


def test_models_listed_under_oip_must_exist(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("pipelines: {p: {model: text_embed}}\noip:\n  models: [text_embed, text_generat]\n")
    (finding,) = check(read_repository(pytestconfig.rootpath / "triton_models"), read_gateway_file(config))
    assert (finding.code, finding.model) == ("gateway-yaml", "text_generat")
    assert "gateway.yaml:3: oip.models.1 'text_generat' is not a model in the repository" in finding.text
    assert "did you mean 'text_generate'" in finding.text


async def test_a_different_signature_at_one_triton_is_a_finding(caplog: pytest.LogCaptureFixture) -> None:
    usual, other = model("X FP32 [1]", "Y FP32 [1]", name="m"), model("X FP32 [2]", "Y FP32 [1]", name="m")
    balancer, _ = balanced(FakeEngine.of(usual), FakeEngine.of(other), FakeEngine.of(usual))
    with caplog.at_level(logging.ERROR):
        await log_findings(balancer, None)
    found = [record for record in caplog.records if getattr(record, "code", "") == "other-signature"]
    assert [(record.__dict__["model"], "triton-1:1" in record.message) for record in found] == [("m", True)]
