"""A REST and Server-Sent Events gateway for NVIDIA Triton Inference Server."""

__version__ = "0.1.0"
