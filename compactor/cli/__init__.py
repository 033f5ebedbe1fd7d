"""The command `persist maintain`."""
