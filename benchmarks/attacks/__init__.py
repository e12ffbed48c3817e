"""Attacks on a gateway: how much memory they take, and how late other requests are answered meanwhile."""
