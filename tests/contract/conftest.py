"""The providers' fixtures."""

from __future__ import annotations

from tests.contract.blob_providers import *  # noqa: F403
from tests.contract.consensus_providers import *  # noqa: F403
