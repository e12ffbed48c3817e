"""Compiles gateway.yaml against the models that Triton serves, and converts requests to tensors and results back.

The dialects import `catalog.py`, `pipeline.py` and `run.py`; nothing here knows HTTP. Begin with `spec.py`, then
`pipeline.py`.
"""
