"""Tables of an engine as JSON files in its package."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def json_table(package: str, file: str) -> dict[str, Any]:
    """Return the content of a file next to a package's modules; it is read once, so do not change it."""
    content: dict[str, Any] = json.loads((resources.files(package) / file).read_text(encoding="utf-8"))
    return content
