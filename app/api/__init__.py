"""The HTTP layer: parses requests, calls the domain, renders answers. Each folder with a `routes.py` is one dialect.

A dialect imports what lies beside the folders, never another dialect. Begin with `dialect.py`, then `exchange.py` and
`inference.py`.
"""
