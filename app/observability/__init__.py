"""Metrics, logs, traces, and the record of each request.

Every package above may import it; it knows neither HTTP nor gRPC. Begin with `record.py`; a new metric is a line in
`metrics.py` and the place that observes it.
"""
