"""The YAML files that operators write, read at a bounded cost and checked with the line and the key of each complaint.

Import `Section` to declare the keys of a file, and `FollowedFile` to follow a file while the gateway runs.
"""
