"""Ways of using shards that the founding design names: bindings of a source, tables in WAL mode, one writer of many.

Each is made of public calls of `persist.client` alone, so a program can read here how to make its own.
"""
