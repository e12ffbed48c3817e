"""Doubles that enter by the seams the code has: the engine's protocol, and Triton's own wire."""
