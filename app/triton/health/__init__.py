"""Detects what Triton does not report: models that hang, dead Python processes, a server that is stuck.

Begin with the table in `health.py`, which has what calls show and what follows; `health_watch.py` is the loop that acts on it.
"""
