"""The OpenAPI 3.1 document of the gateway's current routes: each dialect describes its part.

Dialects import `answers.py` for what all operations share. Begin with `document.py`.
"""
