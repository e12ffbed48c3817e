"""The console: one page over the public API, with files of its own and nothing from elsewhere."""
