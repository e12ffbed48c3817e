"""Side by side in one run: `python -m benchmarks [NAME ...]`. One module a benchmark; README.md says how to add one."""
