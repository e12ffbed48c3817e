"""What a language model reads and writes as text: chat templates, tokens, tool calls, reasoning and JSON answers.

Pipelines and HTTP are not known here. `template.py` renders the prompt, `tokenizer.py` reads the folder of a model's
tokenizer, and `tool_calls.py` has the formats of tool calls: begin with `answer_parser.py`.
"""
