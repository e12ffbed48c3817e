"""Generated hostile requests of every dialect. The same seed and index always generate the same request."""
