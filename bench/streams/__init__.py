"""Streams and sources of a pipeline that lives for years: what each costs beside the plainest way."""
