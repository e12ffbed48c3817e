"""Hostile JSON: values that fit no field, and text that is not valid JSON."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

CANARY = "sesame"
"""Part of hostile values, addresses and headers. Errors must not repeat it."""
NAME = "poppy"
"""Part of hostile field names. Errors may repeat it."""
RAW = "\ue000%d\ue000"
"""Placeholder for text that no JSON encoder writes."""

TEXTS = [
    "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "9" * 5000, "-" + "9" * 5000, "0." + "1" * 5000, "1e-400", "-0",
    "9223372036854775808", "18446744073709551616", "1.5", "true", "false", "null", "[]", "{}", '""', "[[]]", "[null]",
    "[[[[1]]]]", "[1,[2]]", "[1,[2,3],[4]]", '[1,"a",null]', '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"\\uffff"',
    f'"{CANARY}"', f'["{CANARY}","{CANARY}"]', f'{{"{NAME}":"{CANARY}"}}', '{"a":1,"a":2}', "01", "+1", "1.", ".5",
    "0x10", "'a'", "[1,]", "[" * 40 + "]" * 40, "[" * 70 + "]" * 70, '{"a":' * 70 + "1" + "}" * 70,
    '"' + "\\u00e9" * 500 + '"', "[" + "0," * 300 + "0]", "[" + '"",' * 300 + '""]', '"\r\nevent: done\r\n\r\n"',
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, -(2**31), 2**53, 2**62, 2**63, 2**64, -(2**63) - 1, 10**30, 0.1, 1e308, "", "x",
    CANARY, CANARY * 50, "\x00", "\r\nX-Injected: 1\r\n", "data: {}\n\nevent: error\n\n", "\u2028", "\ufeff",
    "../../etc/passwd", "$(id)", "%s%n", "{{7*7}}", "=" * 60, "*not base64*", "data:image/png;base64,",
    "data:;base64,AAAA", [], [[]], {}, [None], [[1, 2], [3]], [1, "a"], [True], {"b64": "AAAA"}, [2**62], [-1], [0],
    [2**31, 2**31, 2**31], [1] * 40, [""] * 200, [[0.5] * 3] * 20, {NAME: CANARY},
    {str(index): index for index in range(50)},
]  # fmt: skip
NAMES = [
    "", NAME, "early_exit", "id", "event", "retry", "data", "__class__", "constructor", "__proto__", "\x00", "a" * 3000,
    "inputs", "outputs", "parameters", "shape", "datatype", "name", "sequence_id", "sequence_start", "sequence_end",
    "priority", "timeout", "headers", "binary_data_output", "binary_data_size", "binary_data", "classification",
    "triton_final_response", "triton_enable_empty_final_response", "shared_memory_region", "shared_memory_byte_size",
    "shared_memory_offset", "triton_grpc_error", "BOOL", "X", "INPUT",
]  # fmt: skip
DATATYPES = ["", "FP32", "FP64", "BYTES", "BOOL", "INT8", "UINT64", "FP128", "STRING", "bf16", "BF16", CANARY, 5, None]

Change = Callable[[random.Random, Any], str]
"""Each function converts a JSON value to hostile text."""


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a value."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        found += [(value, key), *places(below)]
    return found


def replaced(choose: random.Random, value: Any) -> str:
    """Replaces one or several values, a few of them with text that no encoder writes."""
    value, raws = copy.deepcopy(value), []
    for _ in range(choose.choice([1, 1, 1, 2, 4])):
        found = places(value)
        if not found:
            break
        container, key = choose.choice(found)
        if key == "datatype":
            container[key] = choose.choice(DATATYPES)
        elif choose.random() < 0.4:
            container[key] = RAW % len(raws)
            raws.append(choose.choice(TEXTS))
        else:
            container[key] = copy.deepcopy(choose.choice(VALUES))
    text = _text(value)
    for index, raw in enumerate(raws):
        text = text.replace(_text(RAW % index), raw)
    return text


def renamed(choose: random.Random, value: Any) -> str:
    """Removes, renames or adds a key."""
    value = copy.deepcopy(value)
    objects = [
        each for each in [value, *(container[key] for container, key in places(value))] if isinstance(each, dict)
    ]
    target = choose.choice(objects)
    key = choose.choice([*target, None])
    if key is not None and choose.random() < 0.7:
        moved = target.pop(key)
        if choose.random() < 0.5:
            target[choose.choice(NAMES)] = moved
    else:
        target[choose.choice(NAMES)] = copy.deepcopy(choose.choice(VALUES))
    return _text(value)


def repeated(choose: random.Random, value: Any) -> str:
    """Repeats a key or an element, or adds a thousand unknown keys."""
    text = _text(value)
    if choose.random() < 0.5 and isinstance(value, dict) and value:
        key = choose.choice(list(value))
        return text[:-1] + f", {_text(key)}: {_text(choose.choice(VALUES))}}}"
    value = copy.deepcopy(value)
    lists = [container[key] for container, key in places(value) if isinstance(container[key], list) and container[key]]
    if lists:
        found = choose.choice(lists)
        found *= choose.choice([2, 3, 50, 200])
    else:
        value |= {f"{NAME}{index}": index for index in range(1000)}
    return _text(value)


def nested(choose: random.Random, value: Any) -> str:
    """Nests a value slightly or far too deep."""
    depth = choose.choice([65, 200, 5000, 100_000])
    opening, closing = choose.choice([("[", "]"), ('{"a":', "}")])
    bomb = opening * depth + "1" + closing * choose.choice([0, depth])
    if not isinstance(value, dict) or choose.random() < 0.3:
        return bomb
    return _text({**value, choose.choice([*value, NAME]): RAW % 0}).replace(_text(RAW % 0), bomb)


CHANGES: list[Change] = [replaced, replaced, replaced, replaced, renamed, renamed, repeated, nested]


def no_json(choose: random.Random, text: bytes) -> bytes:
    """Returns bytes that are not valid JSON, or not UTF-8."""
    at = choose.randrange(len(text) + 1)
    forms: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: text[:at],
        lambda: text[:at] + bytes([choose.randrange(256)]) + text[at + 1 :],
        lambda: text[:at] + choose.randbytes(8) + text[at:],
        lambda: b"\xef\xbb\xbf" + text,
        lambda: text.decode().encode("utf-16"),
        lambda: text.decode().encode("utf-32"),
        lambda: text + choose.choice([b"}", b" x", b"\x00", text, b"\n[]"]),
        lambda: text.replace(b'"', b"'"),
        lambda: choose.randbytes(choose.randrange(200)),
        lambda: b"\x00" * choose.randrange(1, 50),
        lambda: b'"' + CANARY.encode() + b"\xff\xfe" + b'"',
    ]
    return choose.choice(forms)()


def hostile_json(choose: random.Random, value: Any) -> bytes:
    if choose.random() < 0.25:
        return no_json(choose, _text(value).encode())
    return choose.choice(CHANGES)(choose, value).encode("utf-8", "surrogatepass")
