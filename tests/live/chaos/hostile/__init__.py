"""Generated hostile requests of every dialect. A seed and an index give the same request again."""
