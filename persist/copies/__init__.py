"""Copies of locations, and whether one is whole."""
