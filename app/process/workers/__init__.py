"""Several processes that serve the API: a supervisor starts and replaces them (docs/decisions/0028-workers.md)."""
