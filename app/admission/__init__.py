"""Decides who may call a model, and when: API keys, queues, and limits that learn from what was measured.

Routes import `admission.py` and `keys.py`; nothing here knows HTTP. Begin with `admission.py`, then `scheduler.py`.
"""
