"""The routes that are independent of the dialects: health, documentation, and the admin port.

`app/main.py` imports them. Each module is one resource.
"""
