"""The formats of tool calls: what each becomes, whole and in random cuts, and texts that are no calls."""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import pytest

from app.llm.answer_parser import MAX_CALLS, MAX_HELD, Parser, Part
from app.llm.tool_calls import GuidedParser, ToolFormat, parser_of
from tests.toolkit.work import CountedText, grows_with

FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)
TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": ["string", "null"]},
            "at": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "any": {},
        },
    },
    "time": {"type": "object", "properties": {}},
}
CALL = ("weather", {"city": 'Sao "P" {x}\n', "days": 3})
PYTHON = r"""weather(city='Sao "P" {x}\n', days=3)"""
JSON = r'{"city": "Sao \"P\" {x}\n", "days": 3}'
CITY = 'Sao "P" {x}\n'
XML = f"<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
TIME = ("time", {})

CALLS: dict[str, tuple[str, str]] = {
    "llama3_json": (f'{{"name": "weather", "parameters": {JSON}}}', '{"name": "time", "parameters": {}}'),
    "pythonic": (PYTHON, "time()"),
    "mistral": (f'{{"name": "weather", "arguments": {JSON}}}', '{"arguments": {}, "name": "time"}'),
    "hermes": (
        f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>',
        '<tool_call>{"arguments": null, "name": "time"}</tool_call>',
    ),
    "qwen3_coder": (
        f"<tool_call>\n{XML}\n</tool_call>",
        "<tool_call><function=time></function></tool_call>",
    ),
    "gpt_oss": (
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>",
        "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}<|call|>",
    ),
}
"""A call of each function."""
AROUND = {"pythonic": ("[", ", ", "]"), "mistral": ("[TOOL_CALLS] [", ", ", "]"), "llama3_json": ("", "; ", "")}


def written(format_: str, *calls: str) -> str:
    before, between, after = AROUND.get(format_, ("", "\n", ""))
    return before + between.join(calls) + after


def parser(format_: ToolFormat) -> Parser:
    return parser_of(format_, TOOLS, None, "")


def merged(parts: Iterable[Part]) -> list[Part]:
    """Joins neighbours of a kind."""
    whole: list[Part] = []
    for part in parts:
        if whole and part.kind == whole[-1].kind != "call":
            whole[-1] = Part(part.kind, whole[-1].text + part.text)
        else:
            whole.append(part)
    return whole


def parts_of(made: Parser, pieces: Iterable[str]) -> list[Part]:
    return merged([*(part for piece in pieces for part in made.add(piece)), *made.finish()])


def read(format_: ToolFormat, text: str) -> list[Part]:
    return parts_of(parser(format_), [text])


def calls_in(parts: Sequence[Part]) -> list[tuple[str, Any]]:
    indexes = [index for index, part in enumerate(parts) if part.kind == "call"]
    return [(parts[index].text, json.loads(parts[index + 1].text)) for index in indexes]


def text_in(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if part.kind == "text")


@pytest.mark.parametrize("format_", FORMATS)
class TestEachFormat:
    @pytest.mark.parametrize("before", ["", "Let me see."])
    @pytest.mark.parametrize("several", [False, True])
    def test_calls_and_the_text_before_them(self, format_: ToolFormat, before: str, *, several: bool) -> None:
        first, second = CALLS[format_]
        calls = (first, second, first) if several else (first,)
        parts = read(format_, (before and before + "\n\n") + written(format_, *calls))
        assert (calls_in(parts), text_in(parts)) == ([CALL, TIME, CALL] if several else [CALL], before)

    def test_a_text_without_a_call_is_kept(self, format_: ToolFormat) -> None:
        text = '  a {b} [c] <d> {"e": [1, {"f": 2}]} [TOOL] <tool> weather(city="x") {"g": \n'
        assert read(format_, text) == [Part("text", text)]

    def test_a_call_of_an_unknown_function_is_text(self, format_: ToolFormat) -> None:
        text = written(format_, CALLS[format_][0].replace("weather", "whether"))
        parts = read(format_, text)
        assert calls_in(parts) == []
        if format_ == "gpt_oss":
            text = text.removesuffix("<|call|>")
        assert text_in(parts) == text

    def test_the_name_comes_before_the_arguments_are_complete(self, format_: ToolFormat) -> None:
        made, text = parser(format_), written(format_, CALLS[format_][0])
        half = [part for character in text[: text.index("days") + 1] for part in made.add(character)]
        kinds = [part.kind for part in merged(half)]
        assert kinds == ([] if format_ == "pythonic" else ["call", "arguments"])

    def test_a_call_that_is_cut_off_is_no_error(self, format_: ToolFormat) -> None:
        text = written(format_, CALLS[format_][0])
        for length in range(len(text)):
            parts = read(format_, text[:length])
            assert [part.text for part in parts if part.kind == "call"] in ([], ["weather"])

    @pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
    def test_cuts_do_not_change_the_answer(self, format_: ToolFormat, count: int) -> None:
        chance = random.Random(count)
        for number in range(count):
            text = random_text(chance, format_)
            pieces = cut(chance, text)
            assert parts_of(parser(format_), pieces) == read(format_, text), (number, text, pieces)


FRAGMENTS = (
    *(call for each in CALLS.values() for call in each),
    *"[]{}\"'\\(),;=:",
    *("text", "time", "time()", "weather(", "None", "a=1", "1e999"),
    *("\n", "  ", " " * 300, "\u00e4\U0001f600", "[" * 60, "x" * (MAX_HELD - 40)),
    *("<tool_call>", "</tool_call>", "<function=weather>", "</function>"),
    *("<parameter=city>", "<parameter=days>", "</parameter>"),
    *["[TOOL_CALLS]", "weather[ARGS]", "weather[CALL_ID]a1[ARGS]", "<|python_tag|>", "<think>", "</think>"],
    *["<|channel|>", "analysis", "final", "<|message|>", "<|start|>assistant", "<|end|>", "<|call|>"],
    *('{"name": "time"', '"parameters": ', '"arguments": ', '{"name":"weather","parameters":{"a":1},"b":{}}'),
    *('"a": "b"', "to=functions.time "),
)


def random_text(chance: random.Random, format_: str) -> str:
    own = [*CALLS[format_], *AROUND.get(format_, ())]
    return "".join(chance.choice(own if chance.random() < 0.4 else FRAGMENTS) for _ in range(chance.randint(1, 9)))


def cut(chance: random.Random, text: str) -> list[str]:
    if chance.random() < 0.2 and len(text) < 2000:
        return list(text)
    ends = sorted(chance.randint(0, len(text)) for _ in range(chance.randint(1, 12)))
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


TEXT_ARGUMENTS = json.dumps({"type": "function", "name": "weather", "parameters": json.dumps(CALL[1])})
LLAMA, OSS = CALLS["llama3_json"][0], CALLS["gpt_oss"][0]


@pytest.mark.parametrize(
    ("format_", "text", "calls", "rest"),
    [
        (
            "mistral",
            f"Wait.[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]time[CALL_ID]a1[ARGS]{{}}",
            [CALL, TIME],
            "Wait.",
        ),
        ("mistral", f"[TOOL_CALLS]weather{JSON}", [CALL], ""),
        ("llama3_json", f"<|python_tag|>{LLAMA}", [CALL], ""),
        ("llama3_json", f"<|python_tag|> {LLAMA}\n", [CALL], ""),
        ("llama3_json", f"{LLAMA}\n{LLAMA}", [CALL, CALL], ""),
        ("llama3_json", f"{LLAMA};", [CALL], ""),
        ("llama3_json", TEXT_ARGUMENTS, [CALL], ""),
        ("llama3_json", f"{LLAMA}\nThere.", [CALL], "\nThere."),
        ("gpt_oss", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{OSS}", [CALL], "I look."),
        ("gpt_oss", "<|channel|>final<|message|>Yes.<|return|>", [], "Yes."),
    ],
)
def test_other_spellings(format_: ToolFormat, text: str, calls: list[Any], rest: str) -> None:
    parts = read(format_, text)
    assert (calls_in(parts), text_in(parts)) == (calls, rest)


class TestPythonic:
    @pytest.mark.parametrize(
        ("text", "arguments"),
        [
            ("a=-1, b=1.5e3, c=.5", {"a": -1, "b": 1500.0, "c": 0.5}),
            ("a=True, b=false, c=None", {"a": True, "b": False, "c": None}),
            ("a=[1, (2,), []], b={'k': {'l': ')'}},", {"a": [1, [2], []], "b": {"k": {"l": ")"}}}),
            (r"""a="\x41\u00e4\\\'", b='"\n'""", {"a": "A\u00e4\\'", "b": '"\n'}),
        ],
    )
    def test_literals(self, text: str, arguments: Any) -> None:
        assert calls_in(read("pythonic", f"[weather({text})]")) == [("weather", arguments)]

    @pytest.mark.parametrize(
        "text",
        [
            *("1", "a=b", "a=1 b=2", "a=1, a=2", "a=time()", "a={1: 2}", "a=1 + 1", "a==1", "a", "a=", ",", "a=1,,"),
            *("a=" + "[" * 40 + "]" * 40, "a=" + "9" * 400, "a=" + "9" * 40, r'a="\ud800"', r'a="\UFFFFFFFF"'),
        ],
    )
    def test_what_is_no_literal_makes_text(self, text: str) -> None:
        assert read("pythonic", f"[weather({text})]") == [Part("text", f"[weather({text})]")]


class TestQwen3Coder:
    @pytest.mark.parametrize(
        ("key", "value", "read_as"),
        [
            ("city", "5", "5"),
            ("city", "\na\n\nb\n", "a\n\nb"),
            ("days", "\n5\n", 5),
            ("days", "five", "five"),
            ("units", "None", None),
            ("units", "metric", "metric"),
            ("units", '"metric"', '"metric"'),
            ("at", '{"a": [true]}', {"a": [True]}),
            ("at", "{'a': 1", "{'a': 1"),
            ("any", "5", "5"),
            ("other", "true", "true"),
        ],
    )
    def test_the_schema_gives_the_type(self, key: str, value: str, read_as: Any) -> None:
        text = f"<tool_call><function=weather><parameter={key}>{value}</parameter></function></tool_call>"
        assert calls_in(read("qwen3_coder", text)) == [("weather", {key: read_as})]

    def test_a_text_is_given_out_while_it_grows(self) -> None:
        made = parser("qwen3_coder")
        made.add("<tool_call><function=weather><parameter=city>")
        assert made.add('a long "text"')[-1] == Part("arguments", r"a long \"text\"")


HM_YES = [Part("reasoning", "Hm."), Part("text", "Yes.")]
OSS_TEXT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
TIME_CALL = CALLS["hermes"][1]


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "parts"),
    [
        ("qwen3", "", "<think>\nHm.\n</think>\n\nYes.", HM_YES),
        (("[T]", "[/T]"), "", "[T]Hm.[/T]Yes.", HM_YES),
        ("gpt_oss", "", OSS_TEXT, HM_YES),
        ("qwen3", "", "Yes. <think>", [Part("text", "Yes. <think>")]),
        ("qwen3", "user\n<think>\n", "Hm.</think>Yes.", HM_YES),
        ("deepseek_r1", "<think>\n\n</think>\n\n", "Yes.", [Part("text", "Yes.")]),
        ("deepseek_r1", "", "Hm.</think>Yes.", HM_YES),
        ("qwen3", "", "<think>Hm.", [Part("reasoning", "Hm.")]),
        (
            "qwen3",
            "",
            f"<think>{TIME_CALL}</think>\n{TIME_CALL}",
            [Part("reasoning", TIME_CALL), Part("call", "time"), Part("arguments", "{}")],
        ),
    ],
    ids=[
        "tags",
        "own tags",
        "the channel analysis",
        "no reasoning",
        "the prompt begins it",
        "the prompt has ended it",
        "deepseek always begins with it",
        "it never ends",
        "a call in it is no call",
    ],
)
def test_reasoning_is_told_from_the_text(reasoning: Any, prompt: str, text: str, parts: list[Part]) -> None:
    format_: ToolFormat | None = "hermes" if TIME_CALL in text else None
    for pieces in ([text], text):
        made = parser_of(format_, TOOLS if format_ else {}, reasoning, prompt)
        assert parts_of(made, pieces) == parts


HOSTILE: dict[str, Callable[[int], str]] = {
    "braces": lambda n: '{"' * (n // 2),
    "objects": lambda n: '{"a":{}' * (n // 7),
    "brackets": lambda n: "[" * n,
    "names": lambda n: "[weather(" * (n // 9),
    "tags": lambda n: "<tool_call>" * (n // 11),
    "functions": lambda n: "<tool_call><function=weather><parameter=days>" * (n // 45),
    "parameters": lambda n: "<tool_call><function=weather>" + "<parameter=days>1</parameter>" * (n // 29),
    "heads": lambda n: "<|channel|>" * (n // 11),
    "messages": lambda n: "<|channel|>commentary to=functions.time<|message|>" * (n // 50),
    "markers": lambda n: "[TOOL_CALLS]" * (n // 12),
    "lists": lambda n: "[TOOL_CALLS][" * (n // 13),
    "spaces": lambda n: " " * n,
    "spaces_after_a_call": lambda n: '[TOOL_CALLS][{"name":"time"},' + " " * n,
    "quotes": lambda n: "[TOOL_CALLS]weather{" + '"\\' * (n // 2),
    "never_ending": lambda n: '{"name": "weather", "parameters": {"city": "' + "x" * n,
    "deep": lambda n: '{"name": "weather", "parameters": ' + '{"a":' * (n // 5),
    "numbers": lambda n: "[weather(a=" + "1," * (n // 2),
    "braces_alone": lambda n: "{" * n,
    "angles": lambda n: "<" * n,
    "ends": lambda n: "<|end|>" * (n // 7),
    "calls": lambda n: "[time()" + ",time()" * (n // 7),
    "json_calls": lambda n: '[TOOL_CALLS][{"name":"time"}' + ',{"name":"time"}' * (n // 16),
    "tagged_calls": lambda n: '<tool_call>{"name":"time"}</tool_call>' * (n // 38),
    "spaces_in_tags": lambda n: "<tool_call>" + " " * n,
}


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("name", HOSTILE)
def test_little_of_a_hostile_text_is_held(format_: ToolFormat, name: str) -> None:
    text = HOSTILE[name](60_000)
    made = parser(format_)

    def held() -> int:
        return len(made._text) - made._at + len(made._space)

    for start in range(0, len(text), 7):
        made.add(text[start : start + 7])
        assert held() <= MAX_HELD + 512
    made.finish()
    assert held() == 0


@pytest.mark.parametrize("format_", [*FORMATS, "reasoning", "guided"])
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("piece", [0, pytest.param(1, marks=pytest.mark.full)], ids=["whole", "characters"])
def test_the_work_grows_with_the_length_only(format_: str, name: str, piece: int) -> None:
    def made() -> Parser:
        if format_ == "guided":
            return GuidedParser(TOOLS, is_named=True)
        return parser_of(None, {}, "qwen3", "<think>") if format_ == "reasoning" else parser(format_)

    def work(length: int) -> Callable[[], object]:
        text, reader = HOSTILE[name](length), made()
        pieces = pieces_of(text, piece or length)
        return lambda: [reader.add(CountedText(each)) for each in pieces] + [reader.finish()]

    assert grows_with(work, 50_000)


def pieces_of(text: str, size: int = 3) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize("format_", FORMATS)
def test_calls_above_the_limit_are_text(format_: ToolFormat) -> None:
    parts = read(format_, written(format_, *[CALLS[format_][1]] * (MAX_CALLS + 1)))
    assert calls_in(parts) == [TIME] * MAX_CALLS
    assert "time" in text_in(parts)
