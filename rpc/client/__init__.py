"""The HTTP client: the transport that `persist.connect("http://...")` uses."""
