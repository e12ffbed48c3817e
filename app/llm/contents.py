"""The contents of messages as a chat template takes them: texts or lists of parts, with a place for each image.

Templates of vision models either write the model's image marker for each part of the type ``image``, or take only
texts, in which the marker must stand already. Two renderings of a short message tell which.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

Message = Mapping[str, Any]
Content = str | Sequence[Mapping[str, Any]]
"""A text, or parts of the types ``text`` and ``image``."""

IMAGE: Mapping[str, Any] = {"type": "image"}
NUMBER = "{number}"
"""In a marker: the number of the image in the conversation, from 1."""
_WORD = "Describe"


@dataclass(frozen=True, slots=True)
class ContentForm:
    """``has_parts``: the template writes the markers itself, for parts of the type ``image``.

    ``marker``: the text of an image for other templates; None if there is none. ``only_parts``: texts must be lists of
    one part too.
    """

    has_parts: bool
    only_parts: bool
    marker: str | None

    @property
    def takes_images(self) -> bool:
        return self.has_parts or self.marker is not None

    def fitted(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns the messages as the template takes them. Their images need :attr:`takes_images`."""
        numbers = count(1)
        return [{**message, "content": self._fitted(message.get("content"), numbers)} for message in messages]

    def has_extra_marker(self, prompt: str, messages: Sequence[Message]) -> bool:
        """Whether the prompt has other markers than those of the images: the model would mistake texts for images."""
        contents = (message["content"] for message in messages if isinstance(message.get("content"), list))
        images: int = sum(part == IMAGE for content in contents for part in content)
        if not images or self.has_parts or self.marker is None or NUMBER in self.marker:
            return False
        return prompt.count(self.marker) != images

    def _fitted(self, content: Any, numbers: Iterator[int]) -> Any:
        if not isinstance(content, str | list) or (isinstance(content, list) and self.has_parts):
            return content
        text = content if isinstance(content, str) else "".join(self._text_of(part, numbers) for part in content)
        return [{"type": "text", "text": text}] if self.only_parts else text

    def _text_of(self, part: Mapping[str, Any], numbers: Iterator[int]) -> str:
        if part["type"] != IMAGE["type"]:
            return str(part["text"])
        return (self.marker or "").replace(NUMBER, str(next(numbers)))


def content_form_of(render: Callable[[Content], str], marker: str | None) -> ContentForm:
    """Finds out what a template takes. ``render``: a user's message with this content; empty if the template fails."""
    text = {"type": "text", "text": _WORD}
    plain, one, two = (render([*images, text]) for images in ([], [IMAGE], [IMAGE, IMAGE]))
    takes_parts = _WORD in plain and not _is_quoted("text", plain)
    has_parts = takes_parts and _WORD in one and not _is_quoted("image", one) and len(plain) < len(one) < len(two)
    return ContentForm(has_parts, takes_parts and _WORD not in render(_WORD), marker)


def _is_quoted(word: str, prompt: str) -> bool:
    """Whether the template wrote the parts themselves, as Python or JSON writes a list."""
    return f"'type': '{word}'" in prompt or f'"type": "{word}"' in prompt
