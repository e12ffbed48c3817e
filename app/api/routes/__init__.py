"""The routes that are independent of the dialects, one module for each resource."""
