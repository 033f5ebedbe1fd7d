"""What a location costs: what it holds and what it did, counted from both stores and priced by a table."""
