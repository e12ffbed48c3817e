"""What ``openai:`` of a pipeline means: its words, and its form compiled against the pipeline's fields."""
