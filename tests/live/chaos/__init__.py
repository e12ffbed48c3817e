"""Faults under load. A ledger compares clients, gateway and models for each request."""
