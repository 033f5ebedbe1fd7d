"""The commit path of a shard: from the log to a State, and the only code that commits."""
