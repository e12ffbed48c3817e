"""The chart, rendered by the real helm."""
