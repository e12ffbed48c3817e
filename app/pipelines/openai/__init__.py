"""Maps OpenAI's fields to those of a pipeline, as `openai:` in gateway.yaml declares, and renders chat templates.

The dialect in `app/api/openai` imports it; HTTP is not known here. Begin with `spec.py`, then `mapping.py`.
`tokenizer.py` reads the tokenizer folder of a model.
"""
