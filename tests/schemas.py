"""Whether files are as the shipped schemas say."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator


def complaints(content: Any, name: str) -> list[str]:
    """Return what `content` has against the shipped schema `name`, and what it has that the schema does not tell of."""
    schema = json.loads((files("detgraph.cfg") / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    content = json.loads(json.dumps(content))
    return [
        f"{error.json_path}: {error.message}" for error in Draft202012Validator(_closed(schema)).iter_errors(content)
    ]


def _closed(schema: Any) -> Any:
    """Return the schema without the room that it has, as shipped, for fields of later versions."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    return {"additionalProperties": False, **closed} if isinstance(schema.get("properties"), dict) else closed
