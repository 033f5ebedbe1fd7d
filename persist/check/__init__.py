"""Checks of a location: findings with their causes and remedies. Read-only."""
