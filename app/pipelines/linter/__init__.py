"""Finds faults in a model repository and gateway.yaml before Triton loads them; pure."""
