"""AWS, Google Cloud and Azure, through Ray's own cluster launcher."""
