"""Ray's cluster launcher in a separate process: `python -m heliostat.backends.cloud.launcher`.

The launcher keeps state in module globals, prints its progress, writes to the temporary directory and reads settings at import.
A process with its own TMPDIR isolates all of that.
"""
