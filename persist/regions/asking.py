"""Asks a server what it tells of its region: `GET /v1/regions`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from persist.core.errors import Unavailable

ANSWER_S = 10.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024


def asked(url: str, token: str | None = None, timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """What the server tells of its region, and of the index. Raises Unavailable: it does not answer, or not this."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/v1/regions", headers=headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            told = json.loads(answer.read(ANSWER_BYTES_MAX))
    except (OSError, ValueError) as error:
        raise Unavailable(f"{url} does not answer: {error}") from error
    if not isinstance(told, dict):
        raise Unavailable(f"{url} does not answer as a server of persist")
    return told


def is_alive(url: str, timeout_s: float = ANSWER_S) -> bool:
    """Whether anything answers there, whatever it says."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/v1/regions", timeout=timeout_s):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
