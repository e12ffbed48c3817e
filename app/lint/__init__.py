"""Finds faults in a model repository and gateway.yaml before Triton loads them.

Import `check.py` to run all checks and `findings.py` for what they report; every check is pure. Begin with `check.py`;
a new check is a code, an entry in `findings.yaml`, and a function in the file of its subject.
"""
