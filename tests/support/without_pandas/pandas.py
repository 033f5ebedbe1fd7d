"""In the place of pandas where a test starts a process: pyarrow loads pandas wherever it is installed."""

raise ImportError("processes of tests run without pandas, as a server's requirements are")
