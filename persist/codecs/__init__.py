"""Rows and schemas as JSON, NDJSON, CSV, Parquet and Arrow streams, in and out."""
