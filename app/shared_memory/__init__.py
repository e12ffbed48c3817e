"""Transfers large tensors through shared memory, which the gateway owns and Triton maps (decision 12).

Begin with `README.md` and `leases.py`. `app/triton` and the process use it.
"""
