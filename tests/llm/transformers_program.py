"""Renders conversations with transformers, and prints the texts as JSON: ``{folder: {conversation: text or null}}``.

Runs in the environment of ``requirements/transformers.txt``. Arguments: a folder with tokenizer folders, and the folder
with ``conversations.json`` and ``tools.json``. Null: the template refuses the conversation, or fails.
"""

import json
import shutil
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

TODAY = datetime(2026, 1, 31, 12)
"""The date that ``strftime_now`` tells."""
_TOKENIZER = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}


class Today:
    @staticmethod
    def now() -> datetime:
        return TODAY


def conversations_in(folder: Path) -> dict[str, Any]:
    """Conversation by name: its messages, and its tools or None."""
    tools = json.loads((folder / "tools.json").read_text())
    conversations = json.loads((folder / "conversations.json").read_text())
    for each in conversations.values():
        each["tools"] = [tools[name] for name in each["tools"]] if "tools" in each else None
    return conversations


def rendered(folder: Path, conversations: dict[str, Any]) -> dict[str, str | None]:
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        Path(copy, "tokenizer.json").write_text(json.dumps(_TOKENIZER))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(copy)
    return {name: _text_of(tokenizer, each) for name, each in conversations.items()}


def _text_of(tokenizer: Any, conversation: dict[str, Any]) -> str | None:
    try:
        return tokenizer.apply_chat_template(
            conversation["messages"], tools=conversation["tools"], tokenize=False, add_generation_prompt=True
        )
    except Exception:
        return None


if __name__ == "__main__":
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = Today
    root, data = map(Path, sys.argv[1:])
    conversations = conversations_in(data)
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    texts = {path.name: rendered(path, conversations) for path in folders}
    json.dump(texts, sys.stdout, ensure_ascii=False, indent=1)
