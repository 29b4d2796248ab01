"""Processes, files and services on other hosts: transports, directories, the Ray API, proxies."""
