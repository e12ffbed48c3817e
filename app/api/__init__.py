"""The HTTP layer: parses requests, calls the domain, renders answers."""
