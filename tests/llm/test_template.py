"""Chat templates: rendered text, limits, rejected templates, and the places of images."""

from pathlib import Path
from typing import Any

import pytest

from app.core.errors import InvalidInput
from app.llm import template
from app.llm.template import IMAGE, ChatTemplate

CHATML = """\
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unknown role') }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}
    {%- if not loop.last %}{{ '\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}
"""


def conversation(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[index % 2], "content": each} for index, each in enumerate(contents)]


def refusal(text: str, *contents: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        ChatTemplate(text, {}).render(conversation(*contents))
    assert caught.value.errors[0].field == "messages"
    return caught.value.detail


GENERATION = """\
{% for message in messages %}
{% set word = 'out' %}
{% generation %}{% set word = message.content %}[{{ word }}]{% endgeneration %}
{{ word }}
{% endfor %}"""
CODE = "{{ 7 * 7 }}{% for x in y %}<b>&"


@pytest.mark.parametrize(
    ("text", "variables", "contents", "expected"),
    [
        (
            CHATML,
            {},
            ["Hi", "Hello", "Bye"],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
            "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("{{ messages[0].content }}", {}, [CODE], CODE),
        ("{{ raise_exception('No system') if messages|length < 2 }}ok", {}, ["a", "b"], "ok"),
        ("{{ strftime_now('%Y-%m-%d') | length }}", {}, ["a"], "10"),
        ("{{ tools | length }}", {"tools": [1, 2]}, ["Hi"], "2"),
        ("{% set a = namespace(self=1) %}{{ a.self }}", {}, ["Hi"], "1"),
        (GENERATION, {}, ["a", "b"], "[a]out\n[b]out\n"),
    ],
    ids=["chatml", "code in a text", "trial refused", "date", "variable", "namespace", "generation"],
)
def test_a_conversation_is_rendered(text: str, variables: dict[str, Any], contents: list[str], expected: str) -> None:
    assert ChatTemplate(text, variables).render(conversation(*contents)) == expected


@pytest.mark.parametrize(
    ("text", "problem", "logged"),
    [
        ("{{ raise_exception('No.') if messages|length > 1 }}", "are refused by the model's chat template: No.", []),
        ("{{ raise_exception('Not ' + messages[0].content) }}", "are refused", []),
        (
            "{{ 1 / (2 - messages|length) }}",
            "cannot be rendered by the model's chat template",
            ["a chat template failed: ZeroDivisionError"],
        ),
    ],
)
def test_a_refusal_has_the_words_of_the_template_and_none_of_the_messages(
    text: str, problem: str, logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert refusal(text, "secret", "b") == f"'messages' {problem}."
    assert caplog.messages == logged


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in range(90000) %}{% if messages|length > 1 %}{% else %}{% break %}{% endif %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(messages|length // 10) }}",
        "{% for m in messages %}{% for n in messages %}{{ m.content }}{% endfor %}{% endfor %}",
        "{{ messages[0].content * (messages|length * messages|length * 100) }}",
    ],
    ids=["loops", "range", "recursion", "quadratic-output", "product"],
)
def test_the_cost_of_a_conversation_is_limited(text: str) -> None:
    assert refusal(text, *["x" * 100] * 200) == "'messages' are too many or too long for the model's chat template."


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *(
            (text, "does not render one message of a user: ")
            for text in (
                "{{ messages.append(1) }}",
                "{{ messages.__class__.__mro__ }}",
                "{{ ''.__class__.__base__.__subclasses__() }}",
                "{{ messages[0].content ** 9 }}",
                "{{ 1 / 0 }}",
                "{{ missing.attribute }}",
                "{% include 'x' %}",
                "{{ tools[0].missing.name }}",
            )
        ),
        ("{% set a = namespace(__call__=1) %}", "SecurityError"),
        ("{% set a = namespace() %}{% set a.__call__ = 1 %}", "SecurityError"),
        ("a\n{% for x %}", "is not a template: line 2: "),
        ("{% generation %}", "is not a template: line 1: "),
    ],
)
def test_a_failing_template_is_rejected_at_compile_time(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ChatTemplate(text, {}, has_tools="tools" in text)


JOINING = [
    "{% set ns.text = ns.text + message.content %}",
    "{% set ns.text = ns.text ~ message.content %}",
    "{% set ns.text = [ns.text, message.content] | join %}",
    "{% set ns.text = '{}{}'.format(ns.text, message.content) %}",
    "{% set ns.text = message.content %}{% set rest = all[1:] %}",
    "{% set ns.text = message.content %}{% set rest = all.strip() %}",
]


@pytest.mark.parametrize("copying", JOINING)
def test_a_text_that_is_copied_for_each_message_is_limited(copying: str) -> None:
    """The templates of DeepSeek join all system messages like this: 7.5 MB of them took 2.3 s."""
    text = (
        "{% set ns = namespace(text='') %}{% set all = messages | map(attribute='content') | join(' ') %}"
        f"{{% for message in messages %}}{copying}{{% endfor %}}{{{{ ns.text | length }}}}"
    )
    joined = ChatTemplate(text, {})
    assert joined.render(conversation(*["word " * 1000] * 40))
    with pytest.raises(InvalidInput, match="too many or too long for the model's chat template"):
        joined.render(conversation(*["x" * 1390] * 5400))


def test_a_long_conversation_is_within_the_limits() -> None:
    rendered = ChatTemplate(CHATML, {}).render(conversation(*["word " * 50] * 1000))
    assert rendered.count("<|im_start|>") == 1001
    assert template.MAX_STEPS >= 4 * 1001


TOOL = {"type": "function", "function": {"name": "f", "description": "é<&", "parameters": {"b": 1, "a": [2]}}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", '{"b": "é<", "a": [1]}'),
        ("(true)", r'{"b": "\u00e9<", "a": [1]}'),
        ("(ensure_ascii=True, sort_keys=True)", r'{"a": [1], "b": "\u00e9<"}'),
        ("(indent=1)", '{\n "b": "é<",\n "a": [\n  1\n ]\n}'),
        ("(separators=(',', ':'))", '{"b":"é<","a":[1]}'),
    ],
)
def test_tojson_has_the_arguments_of_transformers(arguments: str, expected: str) -> None:
    text = "{{ {'b': 'é<', 'a': [1]} | tojson" + arguments + " }}"
    assert ChatTemplate(text, {}).render(conversation("Hi")) == expected


def test_the_limit_of_the_output_counts_the_text_of_tools() -> None:
    tools = [{**TOOL, "function": {**TOOL["function"], "description": "word " * 50_000}}]
    rendered = ChatTemplate("{{ tools | tojson }}" * 3, {}).render(conversation("Hi"), tools)
    assert len(rendered) > 3 * 250_000
    with pytest.raises(InvalidInput, match="too many or too long"):
        ChatTemplate("{{ tools | tojson }}" * 6, {}).render(conversation("Hi"), tools)


def test_only_a_leading_bos_token_is_removed_and_only_once() -> None:
    text = "{{ bos_token }}{{ bos_token }}{{ messages[0].content }}"
    variables = {"bos_token": "<s>"}
    assert ChatTemplate(text, variables).render(conversation("<s>a")) == "<s><s><s>a"
    assert ChatTemplate(text, variables, strips_bos=True).render(conversation("<s>a")) == "<s><s>a"
    assert ChatTemplate("a{{ bos_token }}", {"bos_token": "<s>"}, strips_bos=True).render(conversation("b")) == "a<s>"


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
