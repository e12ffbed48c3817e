"""Tokenizer folders: errors with file and key, and the count of tokens."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app.llm import tokenizer
from app.llm.tokenizer import files_of, read_folder

WORDS = {"model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "[BOS]": 1, "a": 2, "list": 3}, "unk_token": "[UNK]"}}
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
    **WORDS,
}


def write(folder: Path, **files: Any) -> Path:
    """``a__b`` is the file ``a.b``; values that are not text are written as JSON."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def error_of(folder: Path) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        read_folder(folder)
    return str(caught.value)


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
    write(tmp_path, **files)
    assert error_of(tmp_path).startswith(expected.replace("{folder}", str(tmp_path)))


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
