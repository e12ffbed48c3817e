"""The lane for large tensors: shared memory that the gateway owns and Triton maps (decision 0027)."""
