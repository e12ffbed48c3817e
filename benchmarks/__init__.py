"""Benchmarks: `python -m benchmarks [NAME ...]`. One module per benchmark; README.md says how to add one."""
