"""What the Python models of the repository share: one answer per request, early exits, plain values in and out.

Installed into the models' environment; nothing here is imported by the gateway.
"""
