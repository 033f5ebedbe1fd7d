"""Parts: the laws of order, consolidation, encoding and reading."""
