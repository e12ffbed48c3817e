"""Heads of parts and their parameters: what browsers and clients send, and limits for what attackers send."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.pipelines import forms
from app.api.pipelines.forms import MAX_HEAD_BYTES, MAX_PARAMETERS, parts_of
from app.core.errors import InvalidInput, InvalidRequest

FORM = "multipart/form-data; boundary=x"


def body_with(disposition: bytes, *headers: bytes) -> memoryview:
    lines = b"\r\n".join([b"--x", b"Content-Disposition: " + disposition, *headers])
    return memoryview(lines + b"\r\n\r\ncontent\r\n--x--\r\n")


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        (b'form-data; name="a"', "a"),
        (b"form-data; name=a", "a"),
        (b'FORM-DATA;NAME="a"', "a"),
        (b'form-data ; name="a" ; filename="b.png"', "a"),
        (b'form-data; name="a"; filename="b;c;d;e;f;g;h;i;j;k;l.png"', "a"),
        (b'form-data; name="a"; filename="C:\\\\b.png"', "a"),
        (b"form-data; name=\"a\"; filename*=utf-8''%ff", "a"),
        (b'form-data; name="a"; name*=b', "a"),
        (b'form-data; name="a \\"b\\" c"', 'a "b" c'),
        (b'form-data; name="a\\b"', "a\\b"),
        (b'form-data; name="%22"', "%22"),
        ('form-data; name="ü"'.encode(), "ü"),
        (b'form-data; name=""', ""),
        (b'form-data; name="a";', "a"),
        (b'form-data;;; name="a"', "a"),
    ],
)
def test_the_name_of_a_part(disposition: bytes, name: str) -> None:
    assert parts_of(FORM, body_with(disposition)) == {name: b"content"}


@pytest.mark.parametrize(
    "disposition",
    [
        b"",
        b"form-data",
        b'attachment; name="a"',
        b'form-data; name="a',
        b'form-data; name=a"b',
        b'form-data; name="a"b',
        b'form-data; name "a"',
    ],
)
def test_a_part_without_a_clear_name_is_refused(disposition: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parts_of(FORM, body_with(disposition))


USUAL_HEADS = [
    b'\r\nContent-Disposition: form-data; name="image"; filename="1.png"\r\nContent-Type: image/png',
    b'\r\ncontent-disposition: form-data; name="image"; filename="1.png"',
    b'\r\nContent-Disposition: form-data; name="n"\r\nContent-Type: text/plain',
    b'\r\nContent-Disposition: form-data; name="n"',
]
FRAGMENTS = [b"\r\n", b"\r", b"\n", b'"', b"\\", b";", b" ", b":", b"=", b"\xff", b"\0", b"A", *USUAL_HEADS]


def mutated(head: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randrange(4)):
        start = chance.randrange(len(head) + 1)
        head = head[:start] + chance.choice([b"", *FRAGMENTS]) + head[start + chance.randrange(3) :]
    return head


def parts_after(head: bytes) -> dict[str, bytes | list[bytes]] | None:
    """The parts of a form whose second part has this head; None if the form is refused."""
    begun = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x'
    try:
        return parts_of(FORM, memoryview(begun + head + b"\r\n\r\n2\r\n--x--\r\n"), ["a"])
    except InvalidRequest:
        return None


def test_the_pattern_of_usual_heads_finds_the_same_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)
    heads = [mutated(chance.choice(USUAL_HEADS), chance) for _ in range(20_000)]
    assert 5000 < sum(forms._USUAL_HEAD.fullmatch(head + b"\r\n\r\n") is not None for head in heads) < 15_000
    found = [parts_after(head) for head in heads]
    monkeypatch.setattr(forms, "_USUAL_HEAD", re.compile(b"(?!)"))
    assert found == [parts_after(head) for head in heads]


@pytest.mark.parametrize("extra", [0, 1])
def test_the_head_of_a_part_is_limited(extra: int) -> None:
    head = b'\r\nContent-Disposition: form-data; name="a"\r\nX: '
    filling = b"y" * (MAX_HEAD_BYTES - len(head) - len(b"\r\n\r\n") + extra)
    body = memoryview(b"--x" + head + filling + b"\r\n\r\ncontent\r\n--x--\r\n")
    if not extra:
        assert parts_of(FORM, body) == {"a": b"content"}
        return
    with pytest.raises(InvalidRequest, match=str(MAX_HEAD_BYTES)):
        parts_of(FORM, body)


@pytest.mark.parametrize("parameter", [b"; b=c", b";", b'; b="c;d"'])
def test_the_parameters_of_a_part_are_limited(parameter: bytes) -> None:
    at_limit = b'form-data; name="a"' + parameter * (MAX_PARAMETERS - 1)
    assert parts_of(FORM, body_with(at_limit)) == {"a": b"content"}
    with pytest.raises(InvalidRequest, match=str(MAX_PARAMETERS)):
        parts_of(FORM, body_with(at_limit + parameter))


@pytest.mark.parametrize("filling", ["; a=b" * MAX_PARAMETERS, ";" * MAX_PARAMETERS, "; a=" + "b" * MAX_HEAD_BYTES])
def test_the_content_type_of_a_form_is_limited(filling: str) -> None:
    body = body_with(b'form-data; name="a"')
    assert parts_of(f"{FORM}; charset=utf-8", body) == {"a": b"content"}
    with pytest.raises(InvalidRequest):
        parts_of(FORM + filling, body)


def form(*parts: tuple[str, bytes]) -> memoryview:
    each = [b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (n.encode(), c) for n, c in parts]
    return memoryview(b"".join(each) + b"--x--\r\n")


def test_parts_of_a_list_keep_their_order() -> None:
    body = form(("a", b"1"), ("n", b"5"), ("a", b"2"))
    assert parts_of(FORM, body, ["a", "absent"]) == {"a": [b"1", b"2"], "n": b"5"}
    with pytest.raises(InvalidInput, match="given twice"):
        parts_of(FORM, body, ["n"])


def test_the_parts_of_a_list_are_limited() -> None:
    body = form(*[("a", b"1")] * 5)
    assert parts_of(FORM, body, ["a"], max_parts=5) == {"a": [b"1"] * 5}
    with pytest.raises(InvalidRequest):
        parts_of(FORM, body, ["a"], max_parts=4)


@given(st.data(), st.sampled_from([5, 7, 64]))
def test_a_form_has_its_parts_wherever_a_window_ends(data: st.DataObject, window_bytes: int) -> None:
    pieces = st.lists(st.sampled_from([b"a", b"\r", b"\n", b"-", b"\r\n--", b"x", b"--x", b"\r\n\r\n", b"\0" * 90]))
    contents = data.draw(st.lists(pieces.map(b"".join).filter(lambda content: b"\r\n--x" not in content)))
    preamble = data.draw(st.sampled_from([b"", b"\r\n", b"text\r\n"]))
    body = (
        preamble + bytes(form(("n", b""), *[("a", content) for content in contents])) + data.draw(pieces.map(b"".join))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "WINDOW_BYTES", window_bytes)
        found = parts_of(FORM, memoryview(body), ["a"])
    assert found == {"n": b"", **({"a": contents} if contents else {})}


@pytest.mark.parametrize("kept", range(1, 70))
def test_a_form_without_its_end_is_refused(kept: int) -> None:
    body = bytes(form(("a", b"content")))
    with pytest.raises(InvalidRequest):
        parts_of(FORM, memoryview(body)[: len(body) - 4][:kept])
