"""The program `persist`, and its commands of the server."""
