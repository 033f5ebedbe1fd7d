"""A client that has credentials of AWS, in its environment, and no endpoint of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


def give_credentials(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """For the rest of a test. Nothing is read from files."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(directory / "none"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
