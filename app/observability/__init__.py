"""Metrics, logs, traces, and the record of each request."""
