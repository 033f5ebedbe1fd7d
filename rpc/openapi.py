"""What FastAPI cannot see for the OpenAPI document: path parameters that routes read from the request themselves."""

from __future__ import annotations

import re
from typing import Any

_PARAMETER = re.compile(r"\{([a-z_]+)(?::[a-z]+)?\}")
_METHODS = ("get", "put", "post", "delete", "head", "patch", "options")
_KNOWN: dict[str, dict[str, Any]] = {
    "name": {
        "description": "The shard's name: `name` or `region/name`.",
        "schema": {"type": "string", "pattern": r"^[A-Za-z0-9._][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9._-]{1,128})?$"},
        "example": "orders",
    },
    "tag": {
        "description": "The tag's name.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._][A-Za-z0-9._-]{0,127}$"},
        "example": "eom-2026-10",
    },
}


def declare_path_parameters(document: dict[str, Any]) -> dict[str, Any]:
    """The document with every `{parameter}` of its paths declared, as OpenAPI demands. Changes it; idempotent."""
    for path, operations in document.get("paths", {}).items():
        for method in _METHODS:
            operation = operations.get(method)
            if operation is None:
                continue
            declared = operation.setdefault("parameters", [])
            names = {parameter.get("name") for parameter in declared if parameter.get("in") == "path"}
            for name in _PARAMETER.findall(path):
                if name not in names:
                    known = _KNOWN.get(name, {"schema": {"type": "string"}})
                    declared.append({"name": name, "in": "path", "required": True, **known})
    return document
