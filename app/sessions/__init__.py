"""Sessions: each is one sequence of a stateful model in Triton, whose steps run in order, one at a time.

Nothing here knows HTTP. Begin with `session.py`; `registry.py` opens and ends sessions, and `places.py` counts them.
"""
