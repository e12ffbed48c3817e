"""The YAML files that operators write: read at a bounded cost, checked with line numbers, and followed."""
