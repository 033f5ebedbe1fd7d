"""Ways of using shards from the founding design: bindings of a source, tables in WAL mode, one writer of many shards.

Each uses only public calls of `persist.client`, so it also serves as an example.
"""
