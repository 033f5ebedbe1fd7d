"""Durable and wire formats, and the translation of store errors."""
