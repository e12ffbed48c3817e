"""The HTTP layer: parses requests, calls the domain, renders answers. ``app/routes.py`` lists all endpoints.

A dialect imports what lies beside the folders, never another dialect. Begin with `endpoint.py` and `call.py`.
"""
