"""``Idempotency-Key``, a layer: a repeated request gets the first answer again (decision 7).

`idempotency_layer.py` has the layer, the requests that run, and the answers that are kept.
"""
