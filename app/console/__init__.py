"""The console at ``/`` and ``/console``: plain HTML, CSS and ES modules.

The page uses only the public API and loads only its own files, which are in `static/`.
`app/api/openapi.py` serves it.
"""
