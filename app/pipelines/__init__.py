"""Compiles gateway.yaml against live model configurations, and converts requests to tensors and back."""
