"""HTTP only: parse, delegate, render."""
