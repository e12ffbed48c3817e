"""``openai:`` of a pipeline: its keys, and its compilation against the pipeline's fields."""
