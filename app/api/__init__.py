"""The HTTP layer: parses requests, calls the domain, renders answers. ``app/routes.py`` lists all endpoints.

A dialect imports the modules of this folder, never another dialect. Begin with `endpoint.py` and `call.py`.
"""
