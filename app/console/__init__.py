"""The console: a page that uses only the public API and loads only its own files.

`app/main.py` mounts `page.py`; the page itself is in `static/`.
"""
