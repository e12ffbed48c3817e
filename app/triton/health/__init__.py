"""Detects what Triton does not report: models that hang, dead Python processes, a server that is stuck.

Begin with the table in `health.py`: what calls show, and what follows. The loop in `health_watch.py` acts on it.
"""
