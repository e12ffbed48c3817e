"""Transfers large tensors through shared memory, which the gateway owns and Triton maps (decision 0027)."""
