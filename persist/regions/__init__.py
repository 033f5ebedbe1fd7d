"""Regions: read-only replicas from a copy of home's blob store, replication, failover and switchover."""
