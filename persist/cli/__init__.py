"""The commands of the program that are about shards, locations and regions. `rpc.cli.program` has the table."""
