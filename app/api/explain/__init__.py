"""Explains requests with ``X-Explain: 1`` (docs/how-to/explain.md): the gateway's phases, and Triton's own spans.

The console computes the waterfall (``app/console/static/runs.js``). Begin with ``explanations.py``.
"""
