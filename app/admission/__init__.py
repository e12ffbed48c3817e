"""API keys and limits: who may call a pipeline, and how many requests run at a time. Independent of HTTP."""
