"""How fast and how large Heliostat is beside bare Ray, measured side by side in one run. See README.md."""
