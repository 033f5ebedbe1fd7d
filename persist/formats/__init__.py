"""Durable and wire bytes: what crosses HTTP, what lies in stores, and how the errors of stores are told."""
