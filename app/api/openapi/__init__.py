"""The OpenAPI 3.1 document of the gateway's current routes: each dialect describes its part."""
