"""Heads of parts and their parameters: what browsers and clients send, and limits for what attackers send."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api import bodies
from app.api.bodies import MAX_HEADER_BYTES, MAX_HEADERS, parts_of
from app.core.errors import InvalidInput, InvalidRequest
from app.pipelines.body import FilePart

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


@pytest.mark.parametrize("disposition", [b"", b"form-data", b'attachment; name="a"', b'form-data; name "a"', b"name=a"])
def test_a_part_without_a_name_is_refused(disposition: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parts_of(FORM, body_with(disposition))


@pytest.mark.parametrize("name", [b"filename", b"filename*"])
def test_a_part_with_a_file_name_is_a_file(name: bytes) -> None:
    """urllib3 before 2.0 sends names that are not ASCII as ``filename*`` only."""
    assert type(parts_of(FORM, body_with(b'form-data; name="a"; %b=x' % name))["a"]) is FilePart
    assert type(parts_of(FORM, body_with(b'form-data; name="a"'))["a"]) is bytes


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("limit", ["bytes", "headers"])
def test_the_head_of_a_part_is_limited(limit: str, extra: int) -> None:
    header = b"X: " + b"y" * (MAX_HEADER_BYTES - len("X: ") + extra)
    headers = [header] if limit == "bytes" else [b"X: y"] * (MAX_HEADERS - 1 + extra)
    body = body_with(b'form-data; name="a"', *headers)
    if not extra:
        assert parts_of(FORM, body) == {"a": b"content"}
        return
    with pytest.raises(InvalidRequest, match=str(MAX_HEADER_BYTES)):
        parts_of(FORM, body)


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
    body = bytes(form(("n", b""), *[("a", content) for content in contents])) + data.draw(pieces.map(b"".join))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "WINDOW_BYTES", window_bytes)
        found = parts_of(FORM, memoryview(body), ["a"])
    assert found == {"n": b"", **({"a": contents} if contents else {})}


@pytest.mark.parametrize("kept", range(1, 70))
def test_a_form_without_its_end_is_refused(kept: int, caplog: pytest.LogCaptureFixture) -> None:
    body = bytes(form(("a", b"content")))
    with pytest.raises(InvalidRequest):
        parts_of(FORM, memoryview(body)[: len(body) - 4][:kept])
    with pytest.raises(InvalidRequest):
        parts_of(FORM, memoryview(b"text" + body))
    assert not caplog.records, "callers could fill the log"
