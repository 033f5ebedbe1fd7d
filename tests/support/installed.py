"""Programs of the machine that `tests/services/install.sh` installs."""

from __future__ import annotations

import os
import shutil

import pytest


def installed(program: str) -> str:
    """Where it is. The test is skipped where it is not installed, but not in CI."""
    found = shutil.which(program)
    if found is None:
        message = f"{program} is not installed: `bash tests/services/install.sh` installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found
