"""The console: a web page over the HTTP API, without a build step and without external resources."""
