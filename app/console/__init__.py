"""The console: a page that uses only the public API and loads only its own files."""
