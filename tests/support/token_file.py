"""A tokens file of a server, with tokens that a test knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rpc.auth import mint


def write_tokens(path: Path, granted: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Write a token for each id: its scope, then the prefixes that it reaches, or none for all shards. By their ids."""
    tokens, entries = {}, []
    for name, (scope, *prefixes) in granted.items():
        tokens[name], digest = mint(name)
        entries.append({"id": name, "sha256": digest, "scopes": [scope], "prefixes": prefixes})
    path.write_text(json.dumps({"tokens": entries}))
    return tokens


def bearer(token: str) -> dict[str, str]:
    """The header of a request with this token."""
    return {"authorization": f"Bearer {token}"}
