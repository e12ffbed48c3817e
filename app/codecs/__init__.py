"""Converts between JSON and arrays: the structure of a text, lists of numbers, and values by `kind`.

All dialects may import it; it knows no requests. Begin with `kinds.py`; `numbers.py` is the fast path of numbers.
"""
