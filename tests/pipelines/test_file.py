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
SEVENTEEN = f"examples: {{{', '.join(f'e{index}: {{}}' for index in range(17))}}}"
IN_OCR = GOOD + "    "
CODE = "early_exit.0.error.code is wrong: not an allowed value; did you mean "
EXIT, WRONG = "early_exit.0.error.message_pattern", "2: pipelines.ocr is wrong:"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


def error_of(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_gateway_file(path)
    return str(caught.value).replace(f"{path}:", "")


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("timeout: 5", "timeout is not a known key; did you mean 'timeout_s'?"),
        ("steam: true", "steam is not a known key; did you mean 'stream'?"),
        ("early_exit: [{reason: x, eror: {}}]", "early_exit.0.eror is not a known key; did you mean 'error'?"),
        ("zzz: 1", "zzz is not a known key; valid here: adapters, "),
        ("openai: {completion: {}}", "openai.completion is not a known key; did you mean 'completions'?"),
        ("openai: {chat: {templat: x}}", "openai.chat.templat is not a known key; did you mean 'template'?"),
        ("openai: {}", "openai is wrong: needs one of completions, chat and embeddings"),
        ("model: other", "model is used twice"),
        ("timeout_s: soon", "timeout_s is wrong: must be a number"),
        ("timeout_s: 0", "timeout_s is wrong: must be above 0"),
        ("timeout_s: 10s", "timeout_s is wrong: must be a number without a unit"),
        ("rejects_input: a", "rejects_input is wrong: must be a list"),
        ("outputs: [a]", "outputs is wrong: must be a mapping of keys to values"),
        ("stream: 'yes'", "stream is wrong: must be true, false or a mapping of keys to values"),
        ("early_exit: [{reason: x, error: {code: ALREADY_EXIST, message: x}}]", f"{CODE}'ALREADY_EXISTS'?"),
        ("timeout_s: .nan", "timeout_s is wrong: "),
        ('batch: "yes"', "batch is wrong: must be true, false or a mapping of keys to values"),
        ("parameters: {n: {type: integer, minimum: few}}", "parameters.n.minimum is wrong: "),
        (SEVENTEEN, "examples is wrong: must have at most 16 entries"),
        ("examples: {Dark: {}}", "examples.Dark is wrong: must match the pattern ^[a-z0-9_-]{1,64}$"),
        ("examples: {dark:}", "examples.dark is wrong: it is empty; write its keys below it, indented"),
        ("examples: {sample: {}}", "examples is wrong: the name 'sample' is reserved for the pipeline's sample"),
        # values without a JSON form
        ("parameters: {n: {type: number, maximum: .inf}}", "parameters.n.maximum is wrong: "),
        ("parameters: {n: {type: number, default: .nan}}", "parameters.n.default is wrong: "),
        ("parameters: {n: {type: number, enum: [0x" + "f" * 60 + "]}}", "parameters.n.enum.0 is wrong: "),
        ("parameters: {n: {type: string, default: 2024-01-01}}", "parameters.n.default is wrong: "),
        ("sample: {image: !!binary aGk=}", "sample.image is wrong: "),
        ("sample: {image: {1: 2}}", "sample.image is wrong: "),
        *(
            (f"early_exit: [{{reason: x, error: {{code: any, message_pattern: '{pattern}'}}}}]", f"{EXIT} is wrong: ")
            for pattern in ("a{99999999999999999999}", "(" * 5000)
        ),
    ],
    ids=lambda text: text[:60],
)  # fmt: skip
def test_a_problem_of_a_key_is_reported_with_its_line(path: Path, added: str, expected: str) -> None:
    message = error_of(path, f"{GOOD}    {added}\n")
    assert all(line.startswith(f"6: pipelines.ocr.{expected}") for line in message.splitlines()), message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD.replace("kind", "knd"), "5: pipelines.ocr.inputs.image.knd is not a known key; did you mean 'kind'?"),
        (GOOD.replace("pipelines:", "pipes:"), "1: pipes is not a known key; did you mean 'pipelines'?"),
        (GOOD + "  ocr: {model: m}\n", "6: pipelines.ocr is used twice"),
        (GOOD.replace("image}", "picture}"), "5: pipelines.ocr.inputs.image.kind is wrong: not an allowed value; "),
        (GOOD.replace("  ocr:", '  "o c r":'), "2: pipelines.o c r is wrong: must match the pattern"),
        (GOOD.replace("  ocr:", "  12:"), "2: pipelines.12 is wrong: must be text"),
        (IN_OCR + "parameters: {triton_x: {type: integer}}", f"{WRONG} the parameter 'triton_x' is reserved by Triton"),
        (IN_OCR + "outputs: {early_exit: {tensor: Y}}", f"{WRONG} the name 'early_exit' is reserved"),
        (IN_OCR + "parameters: {image: {type: integer}}", f"{WRONG} the name 'image' is used for an input and a param"),
        ("pipelines: {}\n", "1: pipelines is wrong: "),
        ("", "1: the file is empty: begin it with `pipelines:`"),
        ("pipelines:\n\tp: {model: m}\n", "2: a tab stands where YAML needs spaces"),
        ("pipelines:\n  p:\n", "2: pipelines.p is wrong: it is empty; write its keys below it, indented"),
        ("pipelines:\n  p: {}\n", "2: pipelines.p.model is missing: add `model:`"),
        ("- 1\n", "1: the file is wrong: "),
        ("pipelines: [\n", "2: while parsing a flow node expected the node content"),
        (b"pipelines:\n  \xff\n", "2: is not UTF-8 text"),
        ("pipelines:\n  ocr: \x07\n", "1: is not YAML: unacceptable character #x0007"),
    ],
)  # fmt: skip
def test_problems_are_reported(path: Path, text: str | bytes, expected: str) -> None:
    message = error_of(path, text)
    assert any(line.startswith(expected) for line in message.splitlines()), message


def test_every_error_is_on_its_own_line_and_that_of_a_union_is_one(path: Path) -> None:
    message = error_of(path, GOOD + "    timeout: 5\n    batch: 1\n")
    assert len(message.splitlines()) == 2
    message = error_of(path, GOOD + "    contract: {Y: {max_items: [1]}}\n")
    assert {line.split(" is wrong")[0] for line in message.splitlines()} == {"6: pipelines.ocr.contract.Y.max_items"}


def test_without_valid_names_there_is_no_suggestion() -> None:
    assert nearest("x", []) == ""


def test_a_long_list_of_errors_is_shortened(path: Path) -> None:
    message = error_of(path, GOOD + "".join(f"    {'x' * 300}{n}: 1\n" for n in range(1000)))
    assert message.splitlines()[-1].endswith("and 968 more")
    assert len(message) < 32 * 1024


CHAT = GOOD + "    openai:\n      chat: {template: chat.jinja}\n"
TOKENIZER = CHAT.replace("template: chat.jinja", "tokenizer: llama")


@pytest.mark.parametrize(
    ("text", "name", "content", "expected"),
    [
        (CHAT, "", b"", ""),
        (CHAT, "chat.jinja", b"\xff", ""),
        (CHAT, "chat.jinja", b"x" * (64 * 1024 + 1), ""),
        (TOKENIZER, "", b"", "'{folder}' is not a folder"),
        (TOKENIZER, "llama/chat_template.jinja", b"\xff", "chat_template.jinja cannot be read: 'utf-8' codec"),
    ],
    ids=["no template", "not UTF-8", "too large", "no folder", "file of a folder"],
)
def test_a_file_that_cannot_be_read_is_reported_with_its_line(
    path: Path, text: str, name: str, content: bytes, expected: str
) -> None:
    if name:
        (path.parent / name).parent.mkdir(exist_ok=True)
        (path.parent / name).write_bytes(content)
    key, cause = "template" if text is CHAT else "tokenizer", expected.replace("{folder}", str(path.parent / "llama"))
    assert error_of(path, text).startswith(f"7: pipelines.ocr.openai.chat.{key} cannot be read: {cause}")


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


def test_the_nearest_name_of_a_long_text_uses_little_memory() -> None:
    name = "ab" * 1_000_000
    tracemalloc.start()
    assert nearest(name, ["write"]) == "; valid here: write"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(name) / 10
