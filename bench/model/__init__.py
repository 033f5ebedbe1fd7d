"""A capacity model: what many servers over one log store would do, from costs that are measured here."""
