"""What is persisted of clusters: records, their states, the history."""
