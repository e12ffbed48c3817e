"""Explains one request: what the gateway measured, and Triton's own spans (docs/how-to/explain-a-request.md)."""
