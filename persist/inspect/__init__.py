"""Inspection of shards and stores, read-only and without a server."""
