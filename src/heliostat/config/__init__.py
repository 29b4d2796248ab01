"""From `heliostat.yaml`, variables and options to one validated spec."""
