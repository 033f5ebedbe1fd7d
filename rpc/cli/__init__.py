"""The commands `persist serve` and `persist token`."""
