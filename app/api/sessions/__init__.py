"""Sessions of pipelines, a layer: its addresses, its headers, its errors and its part of the OpenAPI document.

Begin with `session_layer.py`. `open_sessions.py` opens sessions, counts their places and runs their steps.
"""
