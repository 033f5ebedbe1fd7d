"""Data-driven scripts; see `harness`."""
