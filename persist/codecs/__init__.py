"""Reading and writing rows and schemas as JSON, NDJSON, CSV, Parquet and Arrow streams."""
