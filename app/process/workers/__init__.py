"""Several processes that serve the API: a supervisor starts and replaces them (docs/decisions/0028-workers.md).

`app/cli.py` imports `supervisor.py` and `worker.py`; they talk through `channel.py`. Begin with `supervisor.py`.
"""
