"""The command-line interface of maintenance."""
