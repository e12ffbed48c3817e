"""Tokenizer folders: read and rendered as transformers does it, errors with file and key, and the count of tokens."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app.api.openai.chat_request import take_messages
from app.core.errors import InvalidInput
from app.llm import template, tokenizer
from app.llm.template import ChatTemplate
from app.llm.tokenizer import files_of, read_folder
from app.pipelines.llm_spec import ChatSpec, OpenAISpec
from app.pipelines.openai_mapping import TextForm
from app.pipelines.spec import PipelineSpec
from tests.conftest import Require
from tests.llm import transformers_program
from tests.llm.transformers_program import Today, conversations_in
from tests.toolkit.environments import locked_environment
from tests.toolkit.models import model, pipeline_of
from tests.toolkit.programs import output_of

FOLDERS = Path(__file__).parent / "templates"
EXPECTED: dict[str, dict[str, str | None]] = json.loads((FOLDERS / "expected.json").read_text())
"""What the program ``transformers_program.py`` prints for these folders."""
CONVERSATIONS = conversations_in(FOLDERS)
LLM = model("PROMPT BYTES [1]", "TEXT BYTES [1]")

TWO_TEMPLATES = [
    {"name": "default", "template": "{{ bos_token }}plain {{ messages[0].content }}{{ image_token }}"},
    {"name": "tool_use", "template": "{{ bos_token }}tools {{ tools | map(attribute='function.name') | join }}"},
]


def template_in(folder: Path, **keys: Any) -> ChatTemplate:
    chat = ChatSpec(prompt="PROMPT", text="TEXT", tokenizer="folder", **{"bos": "keep", **keys})
    openai = OpenAISpec(chat=chat).model_copy(update={"chat": chat.with_folder(read_folder(folder))})
    return pipeline_of(LLM, PipelineSpec(model=LLM.name).model_copy(update={"openai": openai})).openai.chat.template


def rendered(folder: Path, name: str, **keys: Any) -> str | None:
    try:
        return template_in(folder, **keys).render(CONVERSATIONS[name]["messages"], CONVERSATIONS[name]["tools"])
    except InvalidInput:
        return None


CALLED = {"id": "abcdefghi", "function": {"name": "weather", "arguments": '{"city": "Lima"}'}}
WITH_TOOLS = ("gpt-oss", "llama-like", "mistral-nemo", "qwen2.5", "qwen3")


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("answer", [{}, {"content": "Wait.", "reasoning": "Hm."}], ids=["call", "call_with_a_text"])
def test_a_conversation_of_openais_clients_is_rendered(name: str, answer: dict[str, str]) -> None:
    turns = [
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "tool_calls": [CALLED], **answer},
        {"role": "tool", "content": "31 degrees", "tool_call_id": "abcdefghi"},
    ]
    form = TextForm("prompt", "text", None, None, {}, tools="hermes")
    messages, _ = take_messages({"messages": memoryview(json.dumps(turns).encode())}, form, None)
    text = template_in(FOLDERS / name).render(messages, CONVERSATIONS["tools"]["tools"])
    assert text.index("Lima") < text.index("31 degrees")


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "datetime", Today)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("folder", EXPECTED)
def test_a_published_template_is_rendered_as_by_transformers(folder: str, name: str) -> None:
    assert rendered(FOLDERS / folder, name) == EXPECTED[folder][name]


@pytest.mark.parametrize("folder", EXPECTED)
def test_the_leading_bos_token_is_removed(folder: str) -> None:
    tokens = read_folder(FOLDERS / folder).special_tokens
    stripped = EXPECTED[folder]["turns"].removeprefix(tokens.get("bos_token", ""))
    assert rendered(FOLDERS / folder, "turns", bos=None) == rendered(FOLDERS / folder, "turns", bos="strip") == stripped


def write_forms(root: Path) -> None:
    """Writes folders with the same templates in every form, and folders with several of them."""
    jinja, tool_use = TWO_TEMPLATES[0]["template"], TWO_TEMPLATES[1]["template"]
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "image_token": "<i>", "add_bos_token": True}
    config = {**tokens, "bos_token": "<s>"}
    listed = {**config, "chat_template": TWO_TEMPLATES}
    forms: dict[str, dict[str, Any]] = {
        "one text": {"tokenizer_config.json": {**config, "chat_template": jinja}},
        "list": {"tokenizer_config.json": listed},
        "file": {"tokenizer_config.json": config, "chat_template.jinja": jinja},
        "file and list": {"tokenizer_config.json": listed, "chat_template.jinja": "file {{ eos_token }}"},
        "additional": {
            "tokenizer_config.json": config,
            "chat_template.jinja": jinja,
            "additional_chat_templates/tool_use.jinja": tool_use,
            "additional_chat_templates/rag.jinja": "{{ documents }}",
        },
        "map": {"tokenizer_config.json": listed, "special_tokens_map.json": {"bos_token": {"content": "<map>"}}},
        "map without an effect": {
            "tokenizer_config.json": {**listed, "added_tokens_decoder": {}},
            "special_tokens_map.json": {"bos_token": "<map>"},
        },
        "extra": {"tokenizer_config.json": {**listed, "extra_special_tokens": {"image_token": "<extra>"}}},
        "null": {"tokenizer_config.json": {**listed, "bos_token": None, "eos_token": None}},
    }
    for form, files in forms.items():
        for name, content in files.items():
            (root / form / name).parent.mkdir(parents=True, exist_ok=True)
            (root / form / name).write_text(content if isinstance(content, str) else json.dumps(content))


FORMS = {
    "one text": ("<s>plain Hi<i>", "<s>plain Hi<i>"),
    "list": ("<s>plain Hi<i>", "<s>tools f"),
    "file": ("<s>plain Hi<i>", "<s>plain Hi<i>"),
    "file and list": ("file </s>", "file </s>"),
    "additional": ("<s>plain Hi<i>", "<s>tools f"),
    "map": ("<map>plain Hi<i>", "<map>tools f"),
    "map without an effect": ("<s>plain Hi<i>", "<s>tools f"),
    "extra": ("<s>plain Hi<extra>", "<s>tools f"),
    "null": ("plain Hi<i>", "tools f"),
}
HI = [{"role": "user", "content": "Hi"}]
FUNCTION = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_folder_is_read(tmp_path: Path, form: str) -> None:
    write_forms(tmp_path)
    found = template_in(tmp_path / form)
    assert (found.render(HI), found.render(HI, FUNCTION)) == FORMS[form]


@pytest.mark.full
def test_transformers_renders_the_stored_texts(require: Require) -> None:
    assert by_transformers(FOLDERS, FOLDERS, require) == EXPECTED


@pytest.mark.full
def test_transformers_reads_every_form_alike(tmp_path: Path, require: Require) -> None:
    write_forms(tmp_path / "forms")
    (tmp_path / "conversations.json").write_text(
        json.dumps({"plain": {"messages": HI}, "tools": {"messages": HI, "tools": ["f"]}})
    )
    (tmp_path / "tools.json").write_text(json.dumps({"f": FUNCTION[0]}))
    expected = {form: {"plain": plain, "tools": tools} for form, (plain, tools) in FORMS.items()}
    assert by_transformers(tmp_path / "forms", tmp_path, require) == expected


def by_transformers(folders: Path, data: Path, require: Require) -> Any:
    """Runs the program in an environment that cannot download anything."""
    python = locked_environment("transformers", require) / "python3"
    command = [python, "-I", transformers_program.__file__, folders, data]
    return json.loads(output_of(command, environment=os.environ | {"HF_HUB_OFFLINE": "1"}))


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[BOS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"[BOS]": {"id": "[BOS]", "ids": [1], "tokens": ["[BOS]"]}},
    },
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "[BOS]": 1, "a": 2, "list": 3}, "unk_token": "[UNK]"},
}


def write(folder: Path, **files: Any) -> Path:
    """``a__b`` is the file ``a.b``; values that are not text are written as JSON."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "'{folder}' has no chat template: no chat_template.jinja, and no key chat_template in"),
        ({"tokenizer_config__json": "{"}, "tokenizer_config.json cannot be read: "),
        ({"tokenizer_config__json": []}, "tokenizer_config.json must have an object"),
        ({"tokenizer_config__json": {"chat_template": 1}}, "tokenizer_config.json: chat_template must be a text, or a"),
        (
            {"tokenizer_config__json": {"chat_template": [{"name": "default"}]}},
            "tokenizer_config.json: chat_template.0 must be an object with the texts name and template",
        ),
        (
            {"tokenizer_config__json": {"chat_template": [{"name": "tool_use", "template": "x"}]}},
            "tokenizer_config.json: chat_template.0: there is no template with the name 'default'",
        ),
        (
            {"tokenizer_config__json": {"chat_template": "x", "bos_token": 1}},
            "tokenizer_config.json: bos_token must be a text, or an object with the text content",
        ),
        (
            {"chat_template__jinja": "x", "special_tokens_map__json": {"eos_token": {"id": 2}}},
            "special_tokens_map.json: eos_token must be a text, or an object with the text content",
        ),
        ({"chat_template__jinja": "x" * 65_537}, "chat_template.jinja cannot be read: "),
        ({"chat_template__json": {"chat_template": {}}}, "chat_template.json: chat_template must be a text, or a list"),
    ],
)
def test_an_unusable_file_is_reported_with_its_key(tmp_path: Path, files: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        read_folder(write(tmp_path, **files))
    assert str(caught.value).startswith(expected.replace("{folder}", str(tmp_path)))


def test_the_template_of_a_processor_goes_before_the_configuration(tmp_path: Path) -> None:
    config = {"chat_template": "configuration", "eos_token": "</s>"}
    folder = read_folder(write(tmp_path, tokenizer_config__json=config, chat_template__json={"chat_template": "json"}))
    assert folder.templates == {"default": ("json", "chat_template.json: chat_template")}
    assert folder.special_tokens == {"eos_token": "</s>"}
    assert read_folder(write(tmp_path, chat_template__jinja="file")).templates["default"][0] == "file"


def test_the_content_changes_with_any_file(tmp_path: Path) -> None:
    contents = [read_folder(write(tmp_path, chat_template__jinja="a"))]
    contents.append(read_folder(write(tmp_path, special_tokens_map__json={"bos_token": "<s>"})))
    contents.append(read_folder(write(tmp_path, tokenizer__json=TOKENIZER)))
    contents.append(read_folder(write(tmp_path, tokenizer__json={**TOKENIZER, "version": "1.00"})))
    assert all(one != other for one, other in pairwise(contents))
    assert contents[-1] == read_folder(tmp_path)
    assert {tmp_path / "tokenizer.json", tmp_path / "additional_chat_templates"} <= set(files_of(tmp_path))


def test_tokens_are_counted_without_truncation(tmp_path: Path) -> None:
    count = read_folder(write(tmp_path, chat_template__jinja="x", tokenizer__json=TOKENIZER)).count_tokens
    assert [count(""), count("a list , a list"), count("a list", add_special_tokens=True)] == [0, 5, 3]


def test_threads_load_the_tokenizer_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = read_folder(write(tmp_path, chat_template__jinja="x", tokenizer__json=TOKENIZER)).count_tokens
    read, loaded = tokenizer.read_regular_file, list[Path]()
    monkeypatch.setattr(tokenizer, "read_regular_file", lambda path, most: loaded.append(path) or read(path, most))
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(count, ["a list"] * 100)) == [2] * 100
    assert loaded == [tmp_path / "tokenizer.json"]


def test_tokens_are_not_counted_without_the_file_or_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_folder(write(tmp_path, chat_template__jinja="x")).count_tokens is None
    monkeypatch.setattr(tokenizer, "find_spec", lambda _name: None)
    folder = read_folder(write(tmp_path, tokenizer__json=TOKENIZER))
    assert (folder.count_tokens, folder.tokenizer_json) == (None, tmp_path / "tokenizer.json")


def test_other_threads_run_while_tokens_are_counted(tmp_path: Path) -> None:
    write(tmp_path, tokenizer__json=TOKENIZER, chat_template__jinja="x")
    count = read_folder(tmp_path).count_tokens
    count.load()
    text, turns = "a list " * 100_000, 0
    with ThreadPoolExecutor(1) as pool:
        counting = pool.submit(count, text)
        while not counting.done():
            turns += 1
            time.sleep(0.001)
        assert counting.result() == 200_000
    assert turns > 10
