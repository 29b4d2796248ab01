"""What is wrong with a host, a file or a cluster, and what its figures mean."""
