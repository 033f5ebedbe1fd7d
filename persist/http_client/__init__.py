"""The HTTP client of everything in persist that asks a server: shards, regions, inspections, presigned URLs."""
