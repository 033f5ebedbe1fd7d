"""The commands `persist compactor` and `persist gc`."""
