"""Maintenance of a location: garbage collection, expiry, clones and their loans, erasure scans, publications."""
