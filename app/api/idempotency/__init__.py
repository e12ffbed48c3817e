"""``Idempotency-Key``, a layer: a repeated request gets the first answer again (decision 7).

Begin with `idempotency_layer.py`; `repeats.py` has the requests that run and the answers that are kept.
"""
