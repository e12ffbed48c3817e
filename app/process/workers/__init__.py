"""Several processes of one gateway on one port: replicas within a pod, which share nothing but their numbers.

Begin with `parent.py`, which starts and replaces them. `worker.py` is what a worker adds to the start of an ordinary
gateway: its state, and its part of the metrics.
"""
