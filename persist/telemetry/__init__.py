"""Telemetry: metrics of commits, stores and processes, and traces."""
