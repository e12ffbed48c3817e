"""Sessions of pipelines, a layer: its addresses, its headers, its errors and its part of the OpenAPI document.

Begin with `session_layer.py`. `open_sessions.py` opens and ends sessions, `session_steps.py` runs their steps.
"""
