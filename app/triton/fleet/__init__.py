"""One engine over several Tritons: discovery, selection, retries, and the ejection of bad servers.

`app/process/tritons.py` imports it. Begin with `balancer.py`, then `pool.py`.
"""
