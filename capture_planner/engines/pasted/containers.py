"""The commands in the file of a service: Kubernetes' containers, Docker Compose's services, or a list of arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from capture_planner import codec
from capture_planner.engines.pasted.shell import ShellCommand, ShellText
from capture_planner.errors import InvalidDocument

_LOOKS_SO = re.compile(
    r"^\s*(?:-\s+)?[\"']?(?:args|command|containers|services|entrypoint|image)[\"']?\s*:", re.MULTILINE
)
_LIST = re.compile(r"\s*(?:\[|-\s+[\"']?\S)")


def container_commands(text: str) -> ShellText | None:
    """Return the commands of containers in a text of YAML or JSON; None where it is none, or has no container."""
    if not (_LOOKS_SO.search(text) or _LIST.match(text)):
        return None
    commands: list[ShellCommand] = []
    for part in re.split(r"^---.*$", text, flags=re.MULTILINE):
        try:
            data = codec.Document.parse(part, "the file").node.plain()
        except InvalidDocument:
            return None
        if isinstance(data, list) and data and not isinstance(data[0], Mapping):
            data = {"args": data}
        commands += _containers(data)
    return ShellText(tuple(commands)) if commands else None


def _containers(data: Any) -> Iterator[ShellCommand]:
    """Yield the command of each mapping that has one, at any depth."""
    if isinstance(data, list):
        for each in data:
            yield from _containers(each)
    elif isinstance(data, Mapping):
        words = [*_words(data.get("entrypoint")), *_words(data.get("command")), *_words(data.get("args"))]
        if words:
            image = data.get("image")
            front = ["docker", "run", str(image)] if image else []
            given = _variables(data.get("env") or data.get("environment"))
            words = [re.sub(r"\$\((\w+)\)", lambda match: given.get(match[1], match[0]), word) for word in words]
            yield ShellCommand(words=(*front, *words), variables=given)
        else:
            for each in data.values():
                yield from _containers(each)


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return shlex.split(value.replace("\\\n", " "))
    return [str(each) for each in value] if isinstance(value, list) else []


def _variables(value: Any) -> dict[str, str]:
    """Return the variables of a list of names and values, a list of assignments, or a mapping."""
    if isinstance(value, Mapping):
        return {str(name): str(each) for name, each in value.items()}
    found: dict[str, str] = {}
    for each in value if isinstance(value, list) else ():
        if isinstance(each, Mapping):
            found[str(each.get("name"))] = str(each.get("value", ""))
        else:
            name, equals, text = str(each).partition("=")
            found |= {name: text} if equals else {}
    return found
