"""Shared calls: an engine around an engine. It imports nothing of the gateway but ``app.core``.

Begin with `README.md` and `shared_calls.py`, the engine; `rows.py` joins and cuts, and tries a model.
"""
