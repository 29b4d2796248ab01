"""Checks of a host, a spec file or a cluster; sizing and performance advice."""
