"""A key is found by its hash until it expires; every lookup compares all hashes."""

import hmac
from datetime import UTC, datetime
from hashlib import sha256

import pytest

from app.admission import keys
from app.admission.keys import Key, hash_of, key_of, new_key
from app.core.errors import Unauthenticated

TEXTS = [f"tgw_{n}".encode() for n in range(5)]
KEYS = [Key(id=f"k{n}", sha256=[hash_of(text.decode())]) for n, text in enumerate(TEXTS)]


@pytest.mark.parametrize("n", range(5))
def test_each_key_is_found(n: int) -> None:
    assert key_of(KEYS, TEXTS[n], 0.0).caller.id == f"k{n}"


@pytest.mark.parametrize("text", [b"", b"x", TEXTS[0][:-1], TEXTS[0] + b" ", TEXTS[0].upper(), b"\xff" * 9000])
def test_any_other_text_is_unauthenticated(text: bytes) -> None:
    with pytest.raises(Unauthenticated):
        key_of(KEYS, text, 0.0)


@pytest.mark.parametrize("text", [*TEXTS, b"unknown", b""])
def test_every_stored_hash_is_compared_for_every_request(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def counted(known: bytes, given: bytes) -> bool:
        compared.append((known, given))
        return known == given

    monkeypatch.setattr(keys, "compare_digest", counted)
    try:
        key_of(KEYS, text, 0.0)
    except Unauthenticated:
        assert text not in TEXTS
    assert compared == [(sha256(each).digest(), sha256(text).digest()) for each in TEXTS]


def test_hashes_are_compared_in_constant_time() -> None:
    assert keys.compare_digest is hmac.compare_digest


def test_a_key_is_rejected_from_its_expiry_time() -> None:
    known = [Key(id="a", sha256=[hash_of("x")], expires=datetime.fromtimestamp(100, UTC))]
    assert key_of(known, b"x", 99.999)
    with pytest.raises(Unauthenticated, match="has expired"):
        key_of(known, b"x", 100.0)


def test_a_key_may_have_an_old_and_a_new_text() -> None:
    known = [Key(id="a", sha256=[hash_of("old"), hash_of("new")])]
    assert key_of(known, b"old", 0.0) is key_of(known, b"new", 0.0)


def test_scopes_of_a_key() -> None:
    hashes = [hash_of("x")]
    unrestricted = Key(id="a", sha256=hashes)
    restricted = Key(id="b", sha256=hashes, pipelines=["ocr"], dialects=["openai"])
    assert (unrestricted.allows("x"), unrestricted.speaks("oip")) == (True, True)
    assert (restricted.allows("ocr"), restricted.allows("write")) == (True, False)
    assert (restricted.speaks("openai"), restricted.speaks("oip")) == (True, False)


def test_no_repr_shows_a_hash() -> None:
    assert not any(hash_of(text.decode()) in repr(KEYS) for text in TEXTS)
    assert "sha256" not in repr(KEYS)


def test_new_keys_have_256_random_bits() -> None:
    made = {new_key() for _ in range(64)}
    assert len(made) == 64
    assert all(each.startswith("tgw_") and len(each) == 4 + 43 for each in made)
    assert hash_of("abc") == sha256(b"abc").hexdigest()
