"""A key is found by its hash until it expires; every lookup compares all hashes.

The error about an invalid file has the line, the key and the nearest valid name, but no values. The file is read again
when it changes; an invalid one changes nothing.
"""

import hmac
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from app.admission import keys
from app.admission.keys import CallerLimits, FollowedKeys, entry_of, hash_of, new_key, read_keys
from app.config.document import ConfigError
from app.core.errors import Unauthenticated
from app.routes import DIALECTS
from tests.toolkit.keys import entry, key_text, write_keys

HASH = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
GOOD = f"keys:\n  - id: team-a\n    sha256: {HASH}\n"
NEW_YEAR = datetime(2027, 1, 1, tzinfo=UTC)
TEXTS = [key_text(f"k{n}").encode() for n in range(5)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


@pytest.fixture
def followed(path: Path) -> FollowedKeys:
    return FollowedKeys(write_keys(path, *(entry(f"k{n}") for n in range(5))), DIALECTS)


@pytest.mark.parametrize("text", [b"", b"x", TEXTS[0][:-1], TEXTS[0] + b" ", TEXTS[0].upper(), b"\xff" * 9000])
def test_any_other_text_is_unauthenticated(followed: FollowedKeys, text: bytes) -> None:
    with pytest.raises(Unauthenticated):
        followed.key_of(text, 0.0)


@pytest.mark.parametrize("text", [*TEXTS, b"unknown", b""])
def test_every_stored_hash_is_compared_for_every_request(
    followed: FollowedKeys, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keys.compare_digest is hmac.compare_digest  # compares in constant time
    compared = []

    def counted(known: bytes, given: bytes) -> bool:
        compared.append((known, given))
        return known == given

    monkeypatch.setattr(keys, "compare_digest", counted)
    try:
        assert followed.key_of(text, 0.0).id == f"k{TEXTS.index(text)}"
    except Unauthenticated:
        assert text not in TEXTS
    assert compared == [(sha256(each).digest(), sha256(text).digest()) for each in TEXTS]


def test_a_key_is_rejected_from_its_expiry_time(path: Path) -> None:
    known = FollowedKeys(write_keys(path, entry("a", expires="1970-01-01T00:01:40Z")), DIALECTS)
    assert known.key_of(key_text("a").encode(), 99.999)
    with pytest.raises(Unauthenticated, match=r"^The API key has expired\.$"):
        known.key_of(key_text("a").encode(), 100.0)


def test_a_key_may_have_an_old_and_a_new_text(path: Path) -> None:
    known = FollowedKeys(write_keys(path, {"id": "a", "sha256": [hash_of("old"), hash_of("new")]}), DIALECTS)
    assert known.key_of(b"old", 0.0) is known.key_of(b"new", 0.0)


def test_no_repr_shows_a_hash(followed: FollowedKeys) -> None:
    assert not any(hash_of(text.decode()) in repr(followed.keys) for text in TEXTS)
    assert "sha256" not in repr(followed.keys)


def test_new_keys_have_256_random_bits() -> None:
    made = {new_key() for _ in range(64)}
    assert len(made) == 64
    assert all(each.startswith("tgw_") and len(each) == 4 + 43 for each in made)
    assert hash_of("abc") == sha256(b"abc").hexdigest()


def error_of(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(path, DIALECTS)
    return str(caught.value).replace(f"{path}:", "")


def test_all_fields_of_an_entry(path: Path) -> None:
    path.write_text(
        GOOD + "    pipelines: [ocr, write]\n    dialects: [pipelines, oip, openai]\n    priority: 3\n"
        "    limits: {in_flight: 8, queue: 16}\n    expires: 2027-01-01T00:00:00Z\n    explain: true\n"
    )
    key = read_keys(path, DIALECTS)[0]
    assert (key.id, key.priority, key.limits) == ("team-a", 3, CallerLimits(in_flight=8, queue=16))
    assert key.digests == (bytes.fromhex(HASH),)
    assert (key.pipelines, key.dialects) == (["ocr", "write"], ["pipelines", "oip", "openai"])
    assert (key.expires, key.explain) == (NEW_YEAR, True)


def test_defaults_of_an_entry(path: Path) -> None:
    path.write_text(GOOD)
    key = read_keys(path, DIALECTS)[0]
    assert (key.pipelines, key.dialects, key.expires, key.explain) == (None, None, None, False)
    assert (key.priority, key.limits) == (0, CallerLimits())
    path.write_text("keys: []\n")
    assert read_keys(path, DIALECTS) == []


@pytest.mark.parametrize("time", ["2027-01-01T01:00:00+01:00", "'2027-01-01T00:00:00Z'", "2027-01-01 00:00:00Z"])
def test_accepted_formats_of_expires(path: Path, time: str) -> None:
    path.write_text(GOOD + f"    expires: {time}\n")
    assert read_keys(path, DIALECTS)[0].expires == NEW_YEAR


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD + "    pipeline: [ocr]\n", "4: keys.0.pipeline is not a known key; did you mean 'pipelines'?"),
        (
            GOOD + "    limits: {inflight: 1}\n",
            "4: keys.0.limits.inflight is not a known key; did you mean 'in_fli",
        ),
        (GOOD.replace("keys:", "key:"), "1: key is not a known key; did you mean 'keys'?"),
        (
            GOOD + "    dialects: [opanai]\n",
            "4: keys.0.dialects.0 is wrong: not an allowed value; did you mean 'o",
        ),
        (GOOD + "    dialects: []\n", "4: keys.0.dialects is wrong: "),
        (GOOD + "    pipelines: []\n", "4: keys.0.pipelines is wrong: "),
        (GOOD + "    limits: {in_flight: 0}\n", "4: keys.0.limits.in_flight is wrong: "),
        (GOOD + "    priority: high\n", "4: keys.0.priority is wrong: must be a whole number"),
        (GOOD + "    expires: 2027-01-01T00:00:00\n", "4: keys.0.expires is wrong: must have a time zone, such as 2"),
        (GOOD + "    expires: 2027-01-01\n", "4: keys.0.expires is wrong: "),
        (GOOD + "    expires: soon\n", "4: keys.0.expires is wrong: must be a time with its zone, such as 2027-"),
        (GOOD.replace(HASH, "abc"), "3: keys.0.sha256 is wrong: must be the SHA-256 of a key: 64 hexadecimal digits"),
        (GOOD.replace(HASH, "[]"), "3: keys.0.sha256 is wrong: "),
        (GOOD.replace(f"    sha256: {HASH}\n", ""), "2: keys.0.sha256 is missing: add `sha256:`"),
        (GOOD.replace("team-a", "team a"), "2: keys.0.id is wrong: must match the pattern"),
        (
            GOOD + f"  - id: team-a\n    sha256: {hash_of('x')}\n",
            "4: keys.1.id is the id of an earlier key",
        ),
        (
            GOOD + f"  - id: b\n    sha256: {HASH.upper()}\n",
            "5: keys.1.sha256 is a hash that an earlier entry already has",
        ),
    ],
)
def test_an_invalid_file_is_rejected(path: Path, text: str, expected: str) -> None:
    message = error_of(path, text)
    assert any(line.startswith(expected) for line in message.splitlines()), message


def test_a_folder_that_looks_like_a_hash_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / HASH
    folder.mkdir()
    message = error_of(folder / "keys.yaml", GOOD.replace(HASH, f"{HASH}0"))
    assert message.startswith("3: keys.0.sha256 is wrong")


def test_a_missing_file_is_rejected(path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        FollowedKeys(path, DIALECTS)


@pytest.mark.parametrize(
    "text",
    [
        "keys:\n  - id: a\n    sha256: {secret}0\n",
        "keys:\n  - id: {secret}\n    sha256: " + "0" * 64 + "\n",
        "keys:\n  - id: {secret} {secret}\n    sha256: x\n",
        "keys:\n  - {secret}: a\n",
        "{secret}\n",
        "keys: [*{secret}]\n",
        "keys:\n  - id: a\n    sha256: x\n    dialects: [{secret}]\n    expires: {secret}\n",
        "keys:\n  - {secret}: a\n    {secret}: b\n",
        "keys: {secret}\n  x\n",
    ],
)
@pytest.mark.parametrize("secret", [new_key(), HASH], ids=["key", "hash"])
def test_error_messages_never_contain_a_key_or_a_hash(path: Path, text: str, secret: str) -> None:
    path.write_text(text.replace("{secret}", secret))
    with pytest.raises(ConfigError) as caught:
        read_keys(path, DIALECTS)
    assert secret not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("key_id", ["team-a", "123", "true", "1.5", "null", "2027-01-01"])
def test_a_printed_entry_is_valid_in_the_file(path: Path, key_id: str) -> None:
    path.write_text("keys:\n" + entry_of(key_id, HASH))
    assert read_keys(path, DIALECTS)[0].id == key_id
    assert yaml.safe_load(entry_of(key_id, HASH))[0]["sha256"] == HASH


async def test_a_changed_file_is_followed_and_a_broken_one_keeps_the_keys(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = FollowedKeys(write_keys(path, entry("a")), DIALECTS)
    for change, ids, has_failed in (
        (lambda: write_keys(path, entry("b")), ["b"], False),
        (lambda: path.write_text("keys:\n  - id: c\n"), ["b"], True),
        (path.unlink, ["b"], True),
        (lambda: write_keys(path, entry("a"), entry("b")), ["a", "b"], False),
    ):
        change()
        for _ in range(3):
            await keys.follow()
        assert ([each.id for each in keys.keys], keys.has_failed) == (ids, has_failed)
    assert [each.levelname for each in caplog.records] == ["ERROR", "ERROR"]


@pytest.mark.parametrize(("mode", "warnings"), [(0o600, 0), (0o640, 0), (0o644, 1)])
def test_a_world_readable_file_causes_a_warning(
    path: Path, mode: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    write_keys(path, entry("a")).chmod(mode)
    FollowedKeys(path, DIALECTS)
    assert len(caplog.records) == warnings
