"""Attacks on a gateway: how much memory they use, and how much they delay other requests."""
