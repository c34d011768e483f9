"""A YAML writer for files that a serving engine writes: a tenth of the time of ruamel's, which holds the interpreter.

Mappings of more than one line are blocks; everything else is JSON, wrapped, with plain words unquoted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

WIDTH = 110

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_CONSTANTS = {"null", "true", "false"}
_NOT_ASCII = re.compile("[^\x20-\x7e]")


def compact_yaml(data: dict[str, Any]) -> str:
    """Return plain data as YAML; keys are words."""
    return "".join(f"{line}\n" for line in _block(data, ""))


def _block(data: dict[str, Any], pad: str) -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, dict) and not _is_short(value):
            yield f"{pad}{key}:"
            yield from _block(value, pad + "  ")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield f"{pad}{key}:"
            for item in value:
                first, *rest = [pad + _flow(item)] if _is_short(item) else _block(item, f"{pad}    ")
                yield f"{pad}  - {first.lstrip()}"
                yield from rest
        elif isinstance(value, list):
            yield from _wrapped(f"{pad}{key}: [", _items(value), f"{pad}  ")
        else:
            yield f"{pad}{key}: {_flow(value)}"


def _is_short(data: dict[str, Any]) -> bool:
    return all(map(_is_simple, data.values())) and len(_flow(data)) <= WIDTH


def _is_simple(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= 8 and not any(isinstance(item, dict | list) for item in value)
    return not isinstance(value, dict)


def _wrapped(line: str, items: list[str], pad: str) -> Iterator[str]:
    first, width = 0, len(line)
    for index, item in enumerate(items):
        width += len(item) + 2
        if width > WIDTH and index:
            yield f"{line}{', '.join(items[first:index])},"
            line, first, width = pad, index, len(pad) + len(item) + 2
    yield f"{line}{', '.join(items[first:])}]"


def _items(data: list[Any]) -> list[str]:
    if data and not any(isinstance(item, str | list) for item in data):
        return json.dumps(data)[1:-1].split(", ")
    return [_flow(item) for item in data]


def _flow(data: Any) -> str:
    if isinstance(data, dict):
        return "{" + ", ".join(f"{key}: {_flow(value)}" for key, value in data.items()) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(map(_flow, data)) + "]"
    if isinstance(data, str) and _WORD.fullmatch(data) and data.lower() not in _CONSTANTS:
        return data
    return _NOT_ASCII.sub(_numbered, json.dumps(data, ensure_ascii=False))


def _numbered(found: re.Match[str]) -> str:
    """Write a character that JSON may leave as it is, and that a YAML reader or a terminal takes for something else."""
    char = found[0]
    if char.isprintable() and char not in "\ufffe\uffff":
        return char
    return f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08x}"
