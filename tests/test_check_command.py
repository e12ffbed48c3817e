"""``triton-gateway check``: its output and its exit status, and folders of an attacker; drafts of ``init --triton``.

With such folders it ends, uses little memory, and prints no control characters.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.check import write_draft
from app.cli import main
from app.core.errors import Unusable
from app.core.model import ModelConfig, SequenceBatching
from app.pipelines.file import read_gateway_file
from app.triton.model_folder import MAX_CONFIG_BYTES, MAX_SCRIPT_BYTES, MAX_WIRES
from tests.pipelines.test_presets import VLLM
from tests.toolkit.broken_repositories import BROKEN, Repository, sound
from tests.toolkit.models import ensemble, model

Checked = tuple[int, str]
MIB = 1024 * 1024


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Has five valid models. It is the folder ``models`` of the current one."""
    monkeypatch.chdir(tmp_path)
    repository = Repository(tmp_path / "models")
    sound(repository)
    return repository


@pytest.fixture
def check(repository: Repository, capsys: pytest.CaptureFixture[str]) -> Callable[..., Checked]:
    """Returns the exit status and what was printed."""

    def check(*flags: str) -> Checked:
        status = main(["check", "models", *flags])
        return status, "".join(capsys.readouterr())

    return check


@pytest.mark.parametrize(
    ("code", "flags", "status", "said"),
    [
        ("cycle", (), 1, "1 error"),
        ("unordered-stream", (), 0, "1 warning"),
        ("unordered-stream", ("--strict",), 1, "1 warning"),
        ("unknown-edge", ("--strict",), 0, "1 unknown"),
        ("batches-of-one", ("--strict", "--config", "gateway.yaml"), 0, "1 hint"),
    ],
)
def test_the_status_follows_from_the_severity(
    repository: Repository, check: Callable[..., Checked], code: str, flags: tuple[str, ...], *, status: int, said: str
) -> None:
    BROKEN[code].build(repository)
    Path("gateway.yaml").write_text(BROKEN[code].gateway)
    found, output = check(*flags)
    summary, *findings = output.partition("\n\n")[0].splitlines()
    assert (found, len(findings), summary.partition(": ")[2]) == (status, 1, said)
    assert f" {code} " in findings[0]
    assert output.count(f"\n{code}: ") == 1


def test_the_summary_counts_models_and_pipelines(pytestconfig: pytest.Config, monkeypatch, capsys) -> None:
    monkeypatch.chdir(pytestconfig.rootpath)
    assert main(["check"]) == 0
    assert capsys.readouterr().out == "22 models, 13 pipelines: no findings\n"


def test_the_known_faults_of_a_version_are_named_and_can_be_accepted(
    repository: Repository, check: Callable[..., Checked]
) -> None:
    repository.model("asking", "X", "Y", 'parameters { key: "bls_calls" value { string_value: "ident" } }')
    assert "known-fault" not in check()[1]
    status, printed = check("--triton-version", "2.51.0")
    assert (status, "\nTriton 2.51 has " in printed) == (0, True)
    assert "\nwarning known-fault-8882   asking: Triton crashes" in printed
    assert "known-fault-python-420" not in check("--triton-version", "2.63")[1]
    assert check("--strict", "--triton-version", "2.51")[0] == 1
    fields = "{model: ident, inputs: {x: {tensor: X}}, outputs: {y: {tensor: Y}}}"
    accepted = "known-fault-8882, known-fault-7481, known-fault-python-420, known-fault-python-439, batches-of-one"
    Path("models/gateway.yaml").write_text(f"pipelines: {{p: {fields}}}\naccept: [{accepted}]\n")
    summary = check("--triton-version", "2.51")[1].splitlines()[0]
    assert "; accepted: " in summary
    assert "known-fault-8882, known-fault-7481" in summary
    Path("models/gateway.yaml").write_text(f"pipelines: {{p: {fields}}}\naccept: [known-fault-8888, gateway-yaml]\n")
    status, printed = check()
    assert status == 1
    assert "accept.0 is not the code of a finding; did you mean 'known-fault-8882'?" in printed
    assert "accept.1 is an error: mend it" in printed


def test_only_the_gateway_yaml_of_the_models_is_checked(
    repository: Repository, check: Callable[..., Checked], capsys
) -> None:
    BROKEN["gateway-yaml"].build(repository)
    Path("gateway.yaml").write_text(BROKEN["gateway-yaml"].gateway)
    assert ": pipelines.broken" not in check()[1]
    Path("gateway.yaml").rename("models/gateway.yaml")
    status, printed = check()
    assert status == 1
    assert "models/gateway.yaml:4: pipelines.broken.outputs.answer.tensor" in printed
    Path("models").rename("triton_models")
    Path("triton_models/gateway.yaml").rename("gateway.yaml")
    assert main(["check"]) == 1
    assert " gateway.yaml:4: pipelines.broken.outputs.answer.tensor" in capsys.readouterr().out


def test_the_json_format(repository: Repository, check: Callable[..., Checked]) -> None:
    BROKEN["unwritten-tensor"].build(repository)
    status, output = check("--format", "json")
    report = json.loads(output)
    (finding,) = report.pop("findings")
    assert status == 1
    assert report == {"models": 6, "pipelines": None, "accepted": [], "known_faults": ""}
    assert finding["text"].startswith("no step writes 'mit'")
    assert {key: finding[key] for key in finding if key != "text"} == {
        "severity": "error",
        "code": "unwritten-tensor",
        "model": "broken",
        "step": 2,
        "tensor": "mit",
        "page": "/docs/reference/checks.html#unwritten-tensor",
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["absent"], "There is no model repository at absent."),
        (["models", "--config", "absent.yaml"], "absent.yaml: there is no such file"),
        (
            ["--triton", "triton.invalid:8001"],
            "the host name 'triton.invalid' is not known.",
        ),
        (["--triton", "127.0.0.1:9"], "Nothing answers at 127.0.0.1:9 (gRPC). Is it Triton's gRPC port, usually 8001?"),
    ],
)
@pytest.mark.usefixtures("repository")
def test_a_failed_check_is_status_2(capsys, monkeypatch, arguments: list[str], expected: str) -> None:
    """With --triton, the settings of TLS are those of the gateway."""
    assert main(["check", *arguments]) == 2
    assert expected in capsys.readouterr().err
    monkeypatch.setenv("GATEWAY_TRITON_CA", "no.pem")
    assert main(["check", "--triton", "127.0.0.1:9"]) == 2
    assert "no.pem: cannot be read" in capsys.readouterr().err


def test_a_reader_that_closes_the_pipe_early_changes_nothing(repository: Repository) -> None:
    BROKEN["cycle"].build(repository)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "app.cli", "check", str(repository.path)]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(64 * MIB + 1 if path.name == "file" else max(MAX_CONFIG_BYTES, MAX_SCRIPT_BYTES) + 1)


SAMPLE = "inputs: {x: {tensor: X, kind: image}}\n    sample: {x: file}"
TEMPLATE = "inputs: {x: {tensor: X, kind: text}}\n    openai: {chat: {prompt: x, text: y, template: file}}"


@pytest.mark.parametrize("make", [link_to_device, fifo, folder, large])
@pytest.mark.parametrize(
    ("file", "keys", "status", "said"),
    [
        ("ident/config.pbtxt", "", 1, "unreadable-config"),
        ("ident/1/model.py", "", 1, "script-syntax"),
        ("ident/1/x.py", "", 1, "script-syntax"),
        ("gateway.yaml", "", 2, "gateway.yaml: "),
        ("file", SAMPLE, 1, "sample"),
        ("file", TEMPLATE, 2, "template"),
    ],
    ids=["configuration", "script", "another script", "gateway.yaml", "sample", "template"],
)
def test_only_regular_files_of_limited_size_are_read(
    repository: Repository,
    check: Callable[..., Checked],
    make: Callable[[Path], None],
    *,
    file: str,
    keys: str,
    status: int,
    said: str,
) -> None:
    """``keys``: of a pipeline that names the file."""
    repository.model("texts", "X:STRING:1", "Y:STRING:1")
    if keys:
        (repository.path / "gateway.yaml").write_text(f"pipelines:\n  p:\n    model: texts\n    {keys}\n")
    (repository.path / file).unlink(missing_ok=True)
    make(repository.path / file)
    found, printed = check()
    assert found == status
    assert re.search(f"{said}.*cannot be read", printed)


def test_a_gateway_yaml_that_links_nowhere_is_status_2(repository: Repository, check: Callable[..., Checked]) -> None:
    (repository.path / "gateway.yaml").symlink_to("no")
    status, printed = check()
    assert status == 2
    assert re.search("gateway.yaml: .*no such file", printed)


@pytest.mark.parametrize(("depth", "last"), [(28, "ident"), (28, "absent"), (1200, "ident")])
def test_nested_ensembles_are_followed_once(
    repository: Repository, check: Callable[..., Checked], depth: int, last: str
) -> None:
    names = [f"e{level}" for level in range(depth)]
    for name, below in zip(names, [*names[1:], last], strict=True):
        repository.ensemble(name, "X", "Y", f"{below} X=X > Y=t", f"{below} X=t > Y=Y")
    (repository.path / "gateway.yaml").write_text("pipelines: {p: {model: e0}, q: {model: e1}}\n")
    status, printed = check()
    assert (status, f"{depth + 5} models" in printed) == (int(last == "absent"), True)


def test_an_ensemble_with_too_many_wires_is_not_compared(repository: Repository, check: Callable[..., Checked]) -> None:
    steps = [f"ident X=X > Y=t{number}" for number in range(MAX_WIRES // 3 + 1)]
    repository.ensemble("wide", "X", "Y", *steps)
    status, printed = check()
    assert status == 1
    assert f"config.pbtxt:1: more than {MAX_WIRES} tensors, steps and entries of their maps" in printed


def test_the_findings_are_limited(repository: Repository, check: Callable[..., Checked]) -> None:
    for number in range(4):
        steps = [f"absent X=X > Y=t{step}" for step in range(MAX_WIRES // 3 - 1)]
        repository.ensemble(f"wide{number}", "X", "Y", *steps)
    status, printed = check()
    found, _, solutions = printed.partition("\n\n")
    assert (status, len(found.splitlines())) == (1, 1001)
    assert [line.partition(":")[0] for line in solutions.splitlines()] == sorted(
        {line.split()[1] for line in found.splitlines()[1:]}, key=found.index
    )


HOSTILE = "\x1b]0;owned\x07\x1b[31m\u202e\n"


def test_names_are_printed_without_control_characters(repository: Repository, check: Callable[..., Checked]) -> None:
    name = f"a{HOSTILE}"
    repository.ensemble(name, "X", "Y", "ident X=X > Y=Y")
    escaped = HOSTILE.encode("unicode_escape").decode().replace("\\", "\\\\")
    config = f'backend: "python" input {{ name: "{escaped}" data_type: TYPE_FP32 dims: [ -5 ] }}'
    (repository.path / name / "config.pbtxt").write_text(config.replace("\\\\u202e", "").replace("\\\\", "\\"))
    os.mkdir(os.fsencode(repository.path) + b"/\xff\xfe")  # noqa: PTH102 - not a name in UTF-8
    (repository.path / "gateway.yaml").write_text('pipelines: {p: {model: ident, "k\\e[31m": 1}}\n')
    status, printed = check()
    assert status == 2
    assert "\\x1b[31m" in printed
    assert all(line.isprintable() for line in printed.splitlines())
    (repository.path / "gateway.yaml").unlink()
    status, printed = check()
    assert status == 1
    assert "a\\x1b]0;owned\\x07\\x1b[31m\\u202e\\n: " in printed
    assert "\\udcff\\udcfe: " in printed
    assert all(line.isprintable() for line in printed.splitlines())
    status, printed = check("--format", "json")
    assert {finding["model"] for finding in json.loads(printed)["findings"]} >= {"\\udcff\\udcfe"}
    assert printed.strip().isprintable()


def test_a_long_name_is_cut(repository: Repository, check: Callable[..., Checked]) -> None:
    repository.ensemble("long", "X", "Y", f"{'n' * 500_000} X=X > Y=Y")
    status, printed = check()
    assert status == 1
    assert len(printed) < 4000


@pytest.mark.parametrize(
    ("dims", "batch", "code"),
    [
        ("0", 0, "invalid-size"),
        ("-5", 0, "invalid-size"),
        ("4", -1, "invalid-size"),
        ("9223372036854775807", 0, "excessive-size"),
        ("65536,65536", 0, "excessive-size"),
        ("4", 2147483647, "excessive-size"),
        ("-1,2147483647", 65536, None),
    ],
)
def test_sizes_are_checked(
    repository: Repository, check: Callable[..., Checked], dims: str, batch: int, code: str | None
) -> None:
    repository.model("sized", f"X:FP32:{dims}", "Y", batch=batch)
    status, printed = check()
    assert status == int(code == "invalid-size")
    assert (code or "no findings") in printed


def test_a_script_name_that_is_no_file_name_is_a_finding(repository: Repository, check: Callable[..., Checked]) -> None:
    repository.model("named", "X", "Y", f'default_model_filename: "{"n" * 300}"')
    status, printed = check()
    assert status == 1
    assert re.search(r"named: .*n{300} does not exist: the Python backend needs this script", printed)


URL = "127.0.0.1:8001"


def drafted(folder: Path, *configs: ModelConfig) -> str:
    write_draft({config.name: config for config in configs}, URL, folder / "gateway.yaml")
    return (folder / "gateway.yaml").read_text()


def test_the_file_has_fields_kinds_and_streams(tmp_path: Path) -> None:
    config = model(
        [
            *("PROMPT BYTES [1]", "input_image BYTES [1] optional", "Audio.wav BYTES [1]", "doc_json BYTES [1]"),
            "N INT32 [1]",
        ],
        ["TEXT BYTES [1]"],
        name="llm",
        decoupled=True,
    )
    text = drafted(tmp_path, config)
    spec = read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines["llm"]
    assert {name: each.kind for name, each in spec.inputs.items()} == {
        "prompt": "text",
        "input_image": "image",
        "audio.wav": "binary",
        "doc_json": "json",
        "n": "number",
    }
    assert spec.inputs["input_image"].optional
    assert spec.stream is not None
    assert text.count("# a guess\n") == 5


@pytest.mark.parametrize("datatype", ["UINT8", "INT8"])
def test_files_in_numbers_are_guessed_only_where_the_name_is_clear(tmp_path: Path, datatype: str) -> None:
    names = {"ENCODED": "binary", "jpeg_image": "binary", "image_mask": "number", "text_lengths": "number"}
    drafted(tmp_path, model([f"{name} {datatype} [-1]" for name in names], f"PNG {datatype} [4]", name="decode"))
    spec = read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines["decode"]
    assert {each.tensor: each.kind for each in spec.inputs.values()} == names
    assert spec.outputs["png"].kind == "number"


def test_an_llm_backend_gets_its_preset(tmp_path: Path) -> None:
    text = drafted(tmp_path, VLLM)
    (pipeline,) = read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines.values()
    assert (pipeline.model, pipeline.preset) == ("model", "vllm")
    assert "    preset: vllm  # by its tensors" in text


def test_steps_of_an_ensemble_get_no_pipeline(tmp_path: Path) -> None:
    step, other = model("X FP32 [4]", "Y FP32 [4]", name="step"), model("T BYTES [1]", "U BYTES [1]", name="other")
    whole = ensemble("whole", step)
    text = drafted(tmp_path, step, other, whole)
    assert list(read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines) == ["whole", "other"]
    assert "# Steps of ensembles, without a pipeline of their own: step\n" in text


def test_a_model_that_cannot_be_served_is_a_comment_with_the_reason(tmp_path: Path) -> None:
    unknown = model("X FP4 [4]", "Y FP32 [4]", name="unknown")
    text = drafted(tmp_path, unknown, model("T BYTES [1]", "U BYTES [1]", name="other"))
    assert "# The gateway cannot serve it like this: inputs.x.tensor has datatype FP4, which has no JSON form" in text
    assert list(read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines) == ["other"]


def test_a_model_with_a_state_gets_a_session(tmp_path: Path) -> None:
    drafted(tmp_path, model("X FP32 [4]", "Y FP32 [4]", name="stateful", sequence=SequenceBatching()))
    assert read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines["stateful"].session is not None


@pytest.mark.parametrize("name", ["true", "1e3", "null", "a.b-c", "0x10"])
def test_names_that_yaml_would_read_as_values_are_quoted(tmp_path: Path, name: str) -> None:
    drafted(tmp_path, model("early_exit FP32 [4]", "no FP32 [4]", name=name))
    (pipeline,) = read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines.values()
    assert pipeline.model == name
    assert pipeline.inputs["_early_exit"].tensor == "early_exit"


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("mine")
    with pytest.raises(Unusable, match="already exists"):
        drafted(tmp_path, model("X FP32 [4]", "Y FP32 [4]", name="m"))
    assert (tmp_path / "gateway.yaml").read_text() == "mine"


def test_without_a_usable_model_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="has no ready model"):
        drafted(tmp_path)
    assert not (tmp_path / "gateway.yaml").exists()
