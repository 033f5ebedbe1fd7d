"""The command line: `persist serve`, `persist compactor`, `persist gc`, and looking into shards."""
