"""Ray's own cluster launcher, at arm's length: every operation is a process of its own (`python -m heliostat.backends.cloud.launcher`).

The launcher keeps state in its module globals, prints a great deal, leaves files in the folder for temporary ones, and reads
some of its settings when it is imported. In a process with its own TMPDIR none of that meets anybody else.
"""
