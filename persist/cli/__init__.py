"""Commands about shards, locations and regions. `rpc.cli.program` has the table of all commands."""
