"""A model's tokenizer folder, as on Hugging Face: its chat templates, its special tokens and its token counter.

The order of the files is that of transformers 5: template files, then the template of a processor, then the template
in the configuration of the tokenizer. Nothing is downloaded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import NoneType
from typing import TYPE_CHECKING, Any

import orjson

from app.core.files import Stamp, read_regular_file, stamp_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EXTRA = "tokenizers"
"""The optional package that counts tokens, and the extra that installs it."""
MAX_TEMPLATE_BYTES = 64 * 1024
COUNTED_AT_ONCE = 8192
"""Characters whose tokens are counted in about 10 ms."""
_MAX_JSON_BYTES = 16 * 1024 * 1024
_MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
_MAX_ADDITIONAL = 32

_TEMPLATE = "chat_template.jinja"
_ADDITIONAL = "additional_chat_templates"
_PROCESSOR = "chat_template.json"
_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_TOKENIZER = "tokenizer.json"
_KEY = "chat_template"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Templates = Mapping[str, tuple[str, str]]
"""Name of a template -> its text, and the file and key that have it."""


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Counts tokens with a ``tokenizer.json``, which is read once. May be called in several threads.

    Other threads run while it counts, because only the tokenizer's calls for batches release the interpreter's lock.
    """

    path: Path
    stamp: Stamp
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)
    _loaded: "list[Tokenizer]" = field(default_factory=list, init=False, repr=False, compare=False)

    def __call__(self, text: str, *, add_special_tokens: bool = False) -> int:
        """``add_special_tokens``: count those that the tokenizer puts around a prompt. Raises ValueError."""
        (encoded,) = self.load().encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return len(encoded.ids)

    def load(self) -> "Tokenizer":
        """Reads the file if it was not read yet. Raises ValueError."""
        from tokenizers import Tokenizer  # noqa: PLC0415 - needs an extra that may not be installed

        with self._lock:
            if not self._loaded:
                try:
                    tokenizer = Tokenizer.from_buffer(read_regular_file(self.path, _MAX_TOKENIZER_BYTES))
                except Exception as exc:  # tokenizers raises plain exceptions
                    raise ValueError(f"{self.path.name} cannot be read: {exc}") from exc
                tokenizer.no_truncation()
                tokenizer.no_padding()
                self._loaded.append(tokenizer)
            return self._loaded[0]


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """The content of a folder. Two contents are equal if no file has changed."""

    templates: Templates
    """With the template ``default``."""
    special_tokens: Mapping[str, str]
    """By their names in templates, such as ``bos_token``."""
    tokenizer_json: Path | None
    count_tokens: TokenCounter | None
    """None without a ``tokenizer.json`` or without the extra ``tokenizers``."""


def read_folder(path: Path) -> TokenizerFolder:
    """Raises ValueError with the file, and the key in it, that cannot be used."""
    if not path.is_dir():
        raise ValueError(f"'{path}' is not a folder")
    config = _json_of(path / _CONFIG)
    default = {"default": path / _TEMPLATE} if (path / _TEMPLATE).exists() else {}
    found: dict[str, tuple[str, str]] = {}
    for name, file in (default | {file.stem: file for file in _additional_files(path)}).items():
        source = str(file.relative_to(path))
        try:
            found[name] = read_regular_file(file, MAX_TEMPLATE_BYTES).decode("utf-8"), source
        except (OSError, ValueError) as exc:
            raise ValueError(f"{source} cannot be read: {exc}") from exc
    templates = dict(found or _templates_in(_json_of(path / _PROCESSOR), _PROCESSOR) or _templates_in(config, _CONFIG))
    if not templates:
        raise ValueError(f"'{path}' has no chat template: no {_TEMPLATE}, and no key {_KEY} in {_CONFIG}")
    if "default" not in templates:
        raise ValueError(f"{next(iter(templates.values()))[1]}: there is no template with the name 'default'")
    special_tokens = _tokens_in(config, _CONFIG)
    if "added_tokens_decoder" not in config:  # else the configuration lists the added tokens itself
        special_tokens |= _tokens_in(_json_of(path / _SPECIAL_TOKENS), _SPECIAL_TOKENS)
    tokenizer = path / _TOKENIZER if (path / _TOKENIZER).is_file() else None
    counter = TokenCounter(tokenizer, stamp_of(tokenizer)) if tokenizer and find_spec(EXTRA) else None
    return TokenizerFolder(templates, special_tokens, tokenizer, counter)


def files_of(path: Path) -> Iterator[Path]:
    """Yields every path that :func:`read_folder` looks at, whether it exists or not."""
    yield from (path / name for name in (_TEMPLATE, _ADDITIONAL, _PROCESSOR, _CONFIG, _SPECIAL_TOKENS, _TOKENIZER))
    yield from _additional_files(path)


def _additional_files(path: Path) -> list[Path]:
    return sorted((path / _ADDITIONAL).glob("*.jinja"))[:_MAX_ADDITIONAL]


def _templates_in(values: Mapping[str, Any], file: str) -> Templates:
    """The templates under ``chat_template``: one text, or a list of ``{name, template}``. Raises ValueError."""
    given, templates = values.get(_KEY), dict[str, tuple[str, str]]()
    if isinstance(given, str):
        return {"default": (given, f"{file}: {_KEY}")}
    if not isinstance(given, list | NoneType):
        raise ValueError(f"{file}: {_KEY} must be a text, or a list of objects with name and template")
    for index, each in enumerate(given or ()):
        source, entry = f"{file}: {_KEY}.{index}", each if isinstance(each, dict) else {}
        name, template = entry.get("name"), entry.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise ValueError(f"{source} must be an object with the texts name and template")
        templates[name] = template, source
    return templates


def _tokens_in(values: Mapping[str, Any], file: str) -> dict[str, str]:
    """The tokens with a name of their own must be valid; other keys count if they are tokens. Raises ValueError."""
    named = {key: values[key] for key in _NAMED_TOKENS if values.get(key) is not None}
    others = {key: each for key, each in values.items() if key.endswith("_token") and _content_of(each) is not None}
    extra = values.get("extra_special_tokens")
    tokens: dict[str, str] = {}
    for key, value in {**others, **(extra if isinstance(extra, dict) else {}), **named}.items():
        content = _content_of(value)
        if content is None:
            raise ValueError(f"{file}: {key} must be a text, or an object with the text content")
        tokens[key] = content
    return tokens


def _content_of(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _json_of(file: Path) -> Mapping[str, Any]:
    """The object in a file; empty if there is no such file. Raises ValueError."""
    if not file.exists():
        return {}
    try:
        values = orjson.loads(read_regular_file(file, _MAX_JSON_BYTES))
    except (OSError, ValueError) as exc:
        raise ValueError(f"{file.name} cannot be read: {exc}") from exc
    if not isinstance(values, dict):
        raise ValueError(f"{file.name} must have an object")
    return values
