"""The one program that runs on a node: it starts Ray there, watches it, drains it, cleans up after it.

An island: it is carried to the node as one zipapp and may meet any Python from 3.9 on. Standard library only;
it imports nothing of Heliostat, and never Ray (which would cost a second and a hundred megabytes).
"""
