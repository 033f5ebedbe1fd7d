"""Regions: what is published at home is read elsewhere, from a copy of its blob store alone."""
