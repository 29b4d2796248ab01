"""The documentation, and what writes and checks it: pages.py, made.py, hooks.py, recordings/record.py."""
