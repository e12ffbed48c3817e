"""Explains one request: what the gateway measured, and Triton's own spans (docs/how-to/explain.md).

`app/api/explaining.py` fills a request, `app/api/routes/admin.py` receives spans. Begin with `request.py`, then
`waterfall.py`.
"""
