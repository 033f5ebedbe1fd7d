"""The core: pure values and transitions. Standard library only, deterministic, no clock, no I/O, no randomness."""
