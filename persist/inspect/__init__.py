"""Looking at shards and at what lies in both stores, without a server and without writing anything."""
