"""Who may call what, and how much work runs at a time. Knows pipelines by name only, and no HTTP."""
