"""The Open Inference Protocol over HTTP, as Triton implements it: ``/v2``. The pipelines' rules do not apply.

`routes.py` has the dialect and its routes: begin there.
"""
