"""What users hold: connections, shards, writers, readers and listeners."""
