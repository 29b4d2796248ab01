"""Operations on clusters. `manager.ClusterManager` is the entry point; each other file holds one operation."""
