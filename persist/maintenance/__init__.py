"""What a location needs besides commits: garbage collection, expiry, loans of clones, erasure scans, publications."""
