"""Metrics, the log, and what identifies a request."""
