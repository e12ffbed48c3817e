"""Detects what Triton does not report: models that hang, dead Python processes, a server that is stuck.

`app/process/tritons.py` starts the watches of this folder, and the engine reads `health.py`. Begin with `health.py`.
"""
