"""Shared code of the repository's Python models: one answer per request, early exits, conversion of tensors.

Installed in the models' environment; the gateway does not import it.
"""
