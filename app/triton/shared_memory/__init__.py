"""Transfers large tensors through shared memory, which the gateway owns and Triton maps (decision 12).

The engine and the codec import `layout.py`, the process imports `transport.py`. Begin with `transport.py`.
"""
