"""One training step over replicas: SyncStep and its parts."""
