"""gateway.yaml compiled against live model configurations: its words in, tensors out, and back."""
