"""A REST and Server-Sent Events gateway for NVIDIA Triton Inference Server."""
