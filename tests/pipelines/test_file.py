"""The error about an invalid ``gateway.yaml`` has the line, the key and the nearest valid name."""

import tracemalloc
from pathlib import Path

import pytest

from app.config.document import ConfigError
from app.core.text import nearest
from app.pipelines.file import read_gateway_file, warn_without_counter

GOOD = """\
pipelines:
  ocr:
    model: ocr_ensemble
    inputs:
      image: {tensor: IMAGE, kind: image}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


def error_of(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_gateway_file(path)
    return str(caught.value).replace(f"{path}:", "")


def test_the_reference_file_is_valid(pytestconfig: pytest.Config) -> None:
    file = read_gateway_file(pytestconfig.rootpath / "gateway.yaml")
    assert {"ocr", "ocr_bls", "write"} <= file.spec.pipelines.keys()


def test_a_complaint_has_the_line_of_its_key(path: Path) -> None:
    path.write_text(GOOD)
    file = read_gateway_file(path)
    assert file.complaint(("pipelines", "ocr", "inputs", "image", "tensor"), "is odd") == (
        f"{path}:5: pipelines.ocr.inputs.image.tensor is odd"
    )
    assert file.complaint(("pipelines", "ocr", "outputs", "texts"), "is odd").startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD + "    timeout: 5\n", "6: pipelines.ocr.timeout is not a known key; did you mean 'timeout_s'?"),
        (GOOD + "    steam: true\n", "6: pipelines.ocr.steam is not a known key; did you mean 'stream'?"),
        (GOOD.replace("kind", "knd"), "5: pipelines.ocr.inputs.image.knd is not a known key; did you mean 'kind'?"),
        (
            GOOD + "    early_exit:\n      - {reason: x, eror: {}}\n",
            "7: pipelines.ocr.early_exit.0.eror is not a known key; did you mean 'error'?",
        ),
        (GOOD.replace("pipelines:", "pipes:"), "1: pipes is not a known key; did you mean 'pipelines'?"),
        (GOOD + "    zzz: 1\n", "6: pipelines.ocr.zzz is not a known key; valid here: adapters, "),
        (GOOD + "    model: other\n", "6: pipelines.ocr.model is used twice"),
        (GOOD + "  ocr: {model: m}\n", "6: pipelines.ocr is used twice"),
        (GOOD.replace("    model: ocr_ensemble\n", ""), "2: pipelines.ocr.model is missing: add `model:`"),
        (GOOD + "    timeout_s: soon\n", "6: pipelines.ocr.timeout_s is wrong: must be a number"),
        (GOOD + "    timeout_s: 0\n", "6: pipelines.ocr.timeout_s is wrong: must be above 0"),
        (GOOD + "    timeout_s: .nan\n", "6: pipelines.ocr.timeout_s is wrong: "),
        (
            GOOD + '    batch: "yes"\n',
            "6: pipelines.ocr.batch is wrong: must be true, false or a mapping of keys to values",
        ),
        (
            GOOD.replace("kind: image", "kind: picture"),
            "5: pipelines.ocr.inputs.image.kind is wrong: not an allowed value; ",
        ),
        (GOOD.replace("  ocr:", '  "o c r":'), "2: pipelines.o c r is wrong: must match the pattern"),
        (GOOD.replace("  ocr:", "  12:"), "2: pipelines.12 is wrong: must be text"),
        (
            GOOD + "    parameters: {n: {type: integer, minimum: few}}\n",
            "6: pipelines.ocr.parameters.n.minimum is wrong: ",
        ),
        (
            GOOD + "    parameters:\n      triton_x: {type: integer}\n",
            "2: pipelines.ocr is wrong: the parameter 'triton_x' is reserved by Triton",
        ),
        (
            GOOD + "    outputs: {early_exit: {tensor: Y}}\n",
            "2: pipelines.ocr is wrong: the name 'early_exit' is reserved",
        ),
        (
            GOOD + "    parameters: {image: {type: integer}}\n",
            "2: pipelines.ocr is wrong: the name 'image' is used for an input and a parameter",
        ),
        (
            GOOD + "    examples:\n" + "".join(f"      e{index}: {{}}\n" for index in range(17)),
            "6: pipelines.ocr.examples is wrong: must have at most 16 entries",
        ),
        (
            GOOD + "    examples:\n      Dark: {}\n",
            "7: pipelines.ocr.examples.Dark is wrong: must match the pattern ^[a-z0-9_-]{1,64}$",
        ),
        (
            GOOD + "    examples: {dark:}\n",
            "6: pipelines.ocr.examples.dark is wrong: it is empty; write its keys below it, indented",
        ),
        (
            GOOD + "    examples: {sample: {}}\n",
            "6: pipelines.ocr.examples is wrong: the name 'sample' is reserved for the pipeline's sample",
        ),
        ("", "1: the file is empty: begin it with `pipelines:`"),
        ("- 1\n", "1: the file is wrong: "),
        ("pipelines: [\n", "2: while parsing a flow node expected the node content"),
        ("pipelines: {? [a, b] : 1}\n", "1: a key is a list or a mapping instead of text"),
        ("pipelines: &a [*a]\n", "1: an alias contains itself"),
        (b"pipelines:\n  \xff\n", "2: is not UTF-8 text"),
        ("pipelines:\n  ocr: \x07\n", "1: is not YAML: unacceptable character #x0007"),
        ("pipelines:\n  2026-99-99\n", "2: is not a valid timestamp"),
    ],
)
def test_problems_are_reported(path: Path, text: str | bytes, expected: str) -> None:
    message = error_of(path, text)
    assert any(line.startswith(expected) for line in message.splitlines()), message


def test_an_invalid_value_of_a_union_is_reported_once(path: Path) -> None:
    message = error_of(path, GOOD + "    contract: {Y: {max_items: [1]}}\n")
    assert {line.split(" is wrong")[0] for line in message.splitlines()} == {"6: pipelines.ocr.contract.Y.max_items"}


def test_every_error_is_on_its_own_line(path: Path) -> None:
    message = error_of(path, GOOD + "    timeout: 5\n    batch: 1\n")
    assert len(message.splitlines()) == 2


def test_a_missing_file_is_an_error(path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_gateway_file(path)


def test_without_valid_names_there_is_no_suggestion() -> None:
    assert nearest("x", []) == ""


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        ("    parameters: {n: {type: number, maximum: .inf}}\n", "6: pipelines.ocr.parameters.n.maximum"),
        ("    parameters: {n: {type: number, default: .nan}}\n", "6: pipelines.ocr.parameters.n.default"),
        ("    parameters: {n: {type: number, enum: [0x" + "f" * 60 + "]}}\n", "6: pipelines.ocr.parameters.n.enum.0"),
        ("    parameters: {n: {type: string, default: 2024-01-01}}\n", "6: pipelines.ocr.parameters.n.default"),
        ("    sample: {image: !!binary aGk=}\n", "6: pipelines.ocr.sample.image"),
        ("    sample: {image: {1: 2}}\n", "6: pipelines.ocr.sample.image"),
        (
            "    early_exit: [{reason: x, error: {code: any, message_pattern: 'a{99999999999999999999}'}}]\n",
            "6: pipelines.ocr.early_exit.0.error.message_pattern",
        ),
        (
            f"    early_exit: [{{reason: x, error: {{code: any, message_pattern: '{'(' * 5000}'}}}}]\n",
            "6: pipelines.ocr.early_exit.0.error.message_pattern",
        ),
    ],
    ids=lambda text: text[:60],
)
def test_a_value_without_a_json_form_is_rejected(path: Path, addition: str, expected: str) -> None:
    message = error_of(path, GOOD + addition)
    assert all(line.startswith(f"{expected} is wrong: ") for line in message.splitlines()), message


def test_a_file_without_a_pipeline_is_rejected(path: Path) -> None:
    assert error_of(path, "pipelines: {}\n").startswith("1: pipelines is wrong: ")


def test_a_long_list_of_errors_is_shortened(path: Path) -> None:
    message = error_of(path, GOOD + "".join(f"    {'x' * 300}{n}: 1\n" for n in range(1000)))
    assert message.splitlines()[-1].endswith("and 968 more")
    assert len(message) < 32 * 1024


CHAT = GOOD + "    openai:\n      chat: {template: chat.jinja}\n"


def test_a_template_file_is_part_of_the_pipeline(path: Path) -> None:
    path.write_text(CHAT)
    specs = []
    for text in ("one", "two", "two"):
        path.with_name("chat.jinja").write_text(text)
        specs.append(read_gateway_file(path).spec.pipelines["ocr"])
    openai = specs[0].openai
    assert openai is not None
    assert openai.chat is not None
    assert openai.chat.template_text == "one"
    assert specs[0] != specs[1] == specs[2]


@pytest.mark.parametrize("content", [None, b"\xff", b"x" * (64 * 1024 + 1)], ids=["missing", "not-utf-8", "too-large"])
def test_an_unreadable_template_is_reported_with_its_line(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.with_name("chat.jinja").write_bytes(content)
    assert error_of(path, CHAT).startswith("7: pipelines.ocr.openai.chat.template cannot be read: ")


TOKENIZER = CHAT.replace("template: chat.jinja", "tokenizer: llama")


def test_a_tokenizer_folder_is_part_of_the_pipeline(path: Path) -> None:
    path.write_text(TOKENIZER)
    folder = path.parent / "llama"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    files = []
    for text in ("one", "two", "two"):
        (folder / "chat_template.jinja").write_text(text)
        files.append(read_gateway_file(path))
    specs = [file.spec.pipelines["ocr"] for file in files]
    assert specs[0] != specs[1] == specs[2]
    assert {folder / "chat_template.jinja", folder / "tokenizer_config.json"} <= files[0].templates.keys()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read: 'utf-8' codec"),
        ("tokenizer_config.json", b'{"chat_template": 1}', "tokenizer_config.json: chat_template must be a text"),
    ],
)
def test_an_unreadable_tokenizer_folder_is_reported(path: Path, name: str, content: bytes, expected: str) -> None:
    where = "7: pipelines.ocr.openai.chat.tokenizer cannot be read: "
    assert error_of(path, TOKENIZER).startswith(f"{where}'{path.parent / 'llama'}' is not a folder")
    (path.parent / "llama").mkdir()
    (path.parent / "llama" / name).write_bytes(content)
    assert error_of(path, TOKENIZER).startswith(where + expected)


def test_a_missing_tokenizers_package_is_logged_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(TOKENIZER + TOKENIZER.partition("\n")[2].replace("ocr:", "other:"))
    (path.parent / "llama").mkdir()
    for name in ("chat_template.jinja", "tokenizer.json"):
        (path.parent / "llama" / name).write_text("x")
    warn_without_counter(read_gateway_file(path))
    assert caplog.messages == []
    monkeypatch.setattr("app.llm.tokenizer.find_spec", lambda _name: None)
    warn_without_counter(read_gateway_file(path))
    assert caplog.messages == ["tokens cannot be counted with tokenizer.json: pip install '.[tokenizers]'"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{completion: {}}", "6: pipelines.ocr.openai.completion is not a known key; did you mean 'completions'?"),
        ("{chat: {templat: x}}", "6: pipelines.ocr.openai.chat.templat is not a known key; did you mean 'template'?"),
        ("{}", "6: pipelines.ocr.openai is wrong: needs one of completions, chat and embeddings"),
    ],
)
def test_a_wrong_openai_key_suggests_the_closest_name(path: Path, text: str, expected: str) -> None:
    assert expected in error_of(path, GOOD + f"    openai: {text}\n")


def test_the_nearest_name_of_a_long_text_uses_little_memory() -> None:
    name = "ab" * 1_000_000
    tracemalloc.start()
    assert nearest(name, ["write"]) == "; valid here: write"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(name) / 10
