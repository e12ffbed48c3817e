"""OpenAPI 3.1 of what the gateway serves now: each dialect describes its part."""
