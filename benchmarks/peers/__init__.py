"""Servers before one Triton, side by side. A further peer is a module in this package; see benchmarks/README.md."""
