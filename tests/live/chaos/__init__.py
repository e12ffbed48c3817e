"""Faults under load, with a ledger of three sides that must balance: clients, gateway, models."""
