"""Reads `heliostat.yaml`, variables and options into one validated spec."""
