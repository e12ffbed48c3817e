"""Any YAML file is read with limited cost, or rejected with a line number."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import document
from app.config.document import ConfigError, Lines, read_document
from app.core.files import read_regular_file
from app.pipelines.file import read_gateway_file


def alias_bomb(width: int, levels: int) -> str:
    """Returns a few hundred bytes of YAML with ``width`` to the power of ``levels`` values."""
    lines = ["l0: &l0 [x]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * width)}]" for n in range(1, levels + 1)]
    return "\n".join(lines)


def merge_bomb(levels: int) -> str:
    lines = ["l0: &l0 {x: 1}"]
    lines += [f"l{n}: &l{n} {{<<: [*l{n - 1}, *l{n - 1}]}}" for n in range(1, levels + 1)]
    return "\n".join(lines)


def read(folder: Path, content: bytes) -> tuple[Any, Lines]:
    path = folder / "file.yaml"
    path.write_bytes(content)
    return read_document(path)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (alias_bomb(9, 8), "6: the file holds more than 20000 keys and values"),
        (merge_bomb(40), "12: the file holds more than 20000 keys and values"),
        ("[" + "1," * 30_000 + "]", "1: the file holds more than 20000 keys and values"),
        ("[" * 20_000, "1: is nested deeper than 32 levels"),
        ("{" * 20_000, "1: is nested deeper than 32 levels"),
        ("- " * 20_000, "1: is nested deeper than 32 levels"),
        ("? " * 20_000, "1: is nested deeper than 32 levels"),
        ("a: &a [*a]", "1: an alias contains itself"),
        ("\n".join(["a0: &a0 [1]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 90))]), "31: is nested deeper than"),
        ("a: " + "9" * 5_000, "1: has too many digits"),
        ("a: 1" + ":59" * 100_000, "1: has too many digits"),
        ("\na: !!int x", "2: is not a valid int"),
        ('a: !!int ""', "1: is not a valid int"),
        ("a: !!bool x", "1: is not a valid bool"),
        ("a: !!timestamp x", "1: is not a valid timestamp"),
        ("a: 0001-01-01 00:00:00+99:99", "1: is not a valid timestamp"),
        ("a: !!binary €", "1: failed to convert base64 data"),
        ("a: !!python/object:os.system x", "1: could not determine a constructor"),
        ('a: "\\UFFFFFFFF"', "1: is not YAML: "),
        ('a: "\\ud800"', "1: is not a valid str"),
        ('"\\ud800": a', "1: is not a valid str"),
        ("%YAML 1." + "9" * 5_000 + "\n---\na: b", "1: is not YAML: "),
        ("a: b\n---\nc: d", "2: expected a single document"),
        ("a: *" + "x" * 10_000, "1: found undefined alias 'xxx"),
        ("a: 1\nb:\n  c: 1\n  c: 2", "4: b.c is used twice"),
        ("{a: 1}: 2", "1: a key is a list or a mapping instead of text"),
    ],
    ids=lambda text: text[:24],
)
def test_a_hostile_text_is_rejected_with_its_line(tmp_path: Path, text: str, refusal: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text.encode())
    message = str(caught.value).removeprefix(f"{tmp_path / 'file.yaml'}:")
    assert message.startswith(refusal)
    assert len(message) < 400


def test_a_merged_key_has_the_line_of_its_origin(tmp_path: Path) -> None:
    text = "\ufeffbase: &base\n  x: 1\n  y: 2\nown: {<<: *base, y: 3}\nsame: *base\n"
    values, lines = read(tmp_path, text.encode())
    assert values == {"base": {"x": 1, "y": 2}, "own": {"x": 1, "y": 3}, "same": {"x": 1, "y": 2}}
    assert (lines["own", "x"], lines["own", "y"]) == (2, 4)
    assert read(tmp_path, b"# nothing\n") == (None, {(): 1})


def test_a_special_file_is_rejected_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"cannot be read: .*(regular file|directory)"):
            read_document(path)
    with pytest.raises(ConfigError, match="absent: there is no such file"):
        read_document(tmp_path / "absent")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_large_file_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("a: b")
    assert read_regular_file(path, 4) == b"a: b"
    monkeypatch.setattr(document, "MAX_BYTES", 3)
    with pytest.raises(ConfigError, match="is larger than 3 bytes"):
        read_document(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "cp1252"])
def test_another_encoding_than_utf_8_is_an_error(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read(tmp_path, "a: ä".encode(encoding))


SCALARS = st.sampled_from(
    [
        *("p", "m", "x", "text", "~", "true", "1", "-0", "0x1f", "1:30", "1e999", ".inf", ".nan", "9" * 63, "1.5"),
        *("2024-01-01", "!!int x", "!!binary aGk=", "!!set {a, b}", "&a x", "*a", '"\\ud800"', '"\\0"', "=", "<<", ""),
        *("number", "image", "concatenate", "triton_x", "early_exit", '"a{99999999999999999999}"', '"(((("', "any"),
    ]
)
KEYS = st.sampled_from(
    [
        *("pipelines", "p", "model", "version", "inputs", "outputs", "parameters", "tensor", "kind", "join", "type"),
        *("minimum", "maximum", "enum", "default", "optional", "stream", "progress_s", "timeout_s", "early_exit"),
        *("reason", "error", "code", "message", "message_pattern", "contract", "max_items", "shape", "sample", "<<"),
        *("1", "true", "? [a]", "!!binary aGk=", "2024-01-01", "x" * 200),
    ]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(st.tuples(KEYS, inner), max_size=4).map(
            lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"
        ),
    ),
    max_leaves=12,
)
FILES = st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
PIPELINES = VALUES.map(lambda value: f"pipelines: {{p: {value}}}".encode("utf-8", "replace"))


@given(st.one_of(FILES, PIPELINES, VALUES.map(str.encode)))
def test_any_content_is_read_or_rejected(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    with suppress(ConfigError):
        read_gateway_file(path)
