"""The dialect of the pipelines: ``/v1/pipelines`` and ``/v1/streams``, with the names of ``gateway.yaml``.

`routes.py` has the dialect and its routes: begin there.
"""
