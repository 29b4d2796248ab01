"""Records of clusters on disk: files, locks, states, history."""
