"""Servers in front of one Triton. To add a peer, add a module to this package; see benchmarks/README.md."""
