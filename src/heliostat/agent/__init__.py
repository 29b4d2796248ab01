"""The program that runs on a node: it starts Ray, monitors it, drains it and cleans up.

It is copied to the node as one zipapp and runs with any Python from 3.9 on. It uses the standard library only, imports
nothing else of Heliostat, and never imports Ray, which would cost a second and a hundred megabytes.
"""
