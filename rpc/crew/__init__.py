"""The worker processes of one server: which of them a shard is in, and what they share."""
