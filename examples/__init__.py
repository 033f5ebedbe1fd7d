"""Programs that use persist as anybody would."""
