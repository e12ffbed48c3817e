"""Streams: numbered events, exactly one terminal event, cancellation, and the stores of resumable streams.

Routes import `stream.py` and `store.py`; nothing here knows HTTP. Begin with `stream.py`.
"""
