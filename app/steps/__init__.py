"""Steps: a pipeline that the gateway runs itself, as calls of several models (docs/how-to/steps.md).

The gateway starts each step when its inputs are there. Conditions, exits and joins are data of ``gateway.yaml``.
"""
