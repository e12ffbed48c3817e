"""What chat templates take as the content of a message, and how images get their places."""

from pathlib import Path
from typing import Any

import pytest

from app.core.errors import InvalidInput
from app.llm.template import IMAGE, ChatTemplate

TEXT = "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}"
JSON = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
CONCATENATES = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
ONLY_TEXT_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
QWEN_VL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' or 'image' in p or 'image_url' in p %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
LLAVA = (
    "{% for m in messages %}{{ m.role | upper }}: "
    "{% for p in m.content | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }} {% endfor %}{% endfor %}"
)
NEEDS_A_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('No system') }}{% endif %}" + TEXT
PUBLISHED = Path(__file__).parent / "templates"


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


SEVERAL: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [IMAGE, text("What is this?")]},
    {"role": "user", "content": [text("And "), IMAGE, text(" or "), IMAGE]},
]


def made(template: str, marker: str | None = None) -> ChatTemplate:
    return ChatTemplate(template, {}, image_marker=marker)


@pytest.mark.parametrize("template", [TEXT, JSON, CONCATENATES, ONLY_TEXT_PARTS, NEEDS_A_SYSTEM])
def test_a_template_without_a_place_needs_a_marker(template: str) -> None:
    assert not made(template).takes_images
    assert made(template, "<image>").takes_images


def test_a_template_that_takes_parts_writes_the_markers_itself() -> None:
    template = made(QWEN_VL, "<ignored>")
    assert made(QWEN_VL).takes_images
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert template.render(SEVERAL) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{image}What is this?<|im_end|>\n"
        f"<|im_start|>user\nAnd {image} or {image}<|im_end|>\n"
    )


def test_a_template_that_takes_only_parts_gets_every_text_as_a_part() -> None:
    assert made(LLAVA).render(SEVERAL) == (
        "SYSTEM: Be brief. USER: <image>\nWhat is this? USER: <image>\n<image>\nAnd   or  "
    )
    assert made(LLAVA).render([{"role": "user", "content": "Hi"}]) == "USER: Hi "


@pytest.mark.parametrize("template", [TEXT, ONLY_TEXT_PARTS])
def test_the_marker_stands_at_the_place_of_each_image(template: str) -> None:
    rendered = made(template, "<image>").render(SEVERAL)
    assert "<image>What is this?" in rendered
    assert "And <image> or <image>" in rendered


def test_a_marker_may_have_the_number_of_its_image() -> None:
    rendered = made(TEXT, "<|image_{number}|>\n").render(SEVERAL)
    assert "<|image_1|>\nWhat is this?" in rendered
    assert "And <|image_2|>\n or <|image_3|>" in rendered


def test_a_marker_in_a_text_is_refused_beside_images() -> None:
    messages = [{"role": "user", "content": [text("Write <image>"), IMAGE]}]
    with pytest.raises(InvalidInput, match="marker of an image"):
        made(TEXT, "<image>").render(messages)
    assert made(TEXT, "<image>").render([{"role": "user", "content": "Write <image>"}]) == "<user>Write <image>"


def test_the_template_for_tools_needs_a_place_too() -> None:
    tools = "{{ tools[0].function.name }}"
    with_text = ChatTemplate(QWEN_VL, {}, tool_use=ChatTemplate(tools + TEXT, {}, has_tools=True))
    assert not with_text.takes_images
    assert ChatTemplate(QWEN_VL, {}, tool_use=ChatTemplate(tools + QWEN_VL, {}, has_tools=True)).takes_images


@pytest.mark.parametrize("folder", sorted(path.name for path in PUBLISHED.iterdir() if path.is_dir()))
def test_of_the_published_templates_only_that_of_a_vision_model_takes_images(folder: str) -> None:
    found = next(iter((PUBLISHED / folder).glob("*.jinja")), None)
    if found is not None:
        assert made(found.read_text()).takes_images == (folder == "mistral-small-3")
