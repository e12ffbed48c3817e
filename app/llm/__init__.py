"""What a language model reads and writes as text: chat templates, tokens, tool calls, reasoning and JSON answers.

Begin with `README.md` and `answer_parser.py`; `tool_calls.py` has the formats, `template.py` renders the prompt.
"""
