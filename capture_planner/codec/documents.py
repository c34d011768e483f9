"""YAML text -> plain data that knows its places. Refuses what a plan file has no use for.

Tags, non-text keys, duplicate keys, several documents, aliases that expand beyond a bound, nesting
over 32, and files over 1 MiB are refused as the events arrive, before anything large is built.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
from ruamel.yaml import YAML, events
from ruamel.yaml.error import YAMLError

from capture_planner.errors import InvalidDocument, Problem

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_LINES = 20_000
MAX_LINE = 1 << 14
MAX_NODES = 16_000
"""Values in one document, aliases expanded: what can be read within half a second."""
MAX_PROBLEMS = 100
"""Problems reported of one file."""
MAX_KEY = 200
"""Characters of a key that problems repeat."""


class KeyPart(str):
    """The last part of a path that means a key itself, not the value behind it."""


@attrs.define
class Node:
    """A value with its place; containers hold Nodes."""

    value: Any
    line: int
    column: int
    size: int = 1
    keys: dict[str, tuple[int, int]] = attrs.field(factory=dict)

    def plain(self) -> Any:
        """Return the value without places."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    def locate(self, path: Iterable[str | int]) -> tuple[int, int]:
        """Return line and column of a path, or of the nearest thing above it."""
        node = self
        for part in path:
            if isinstance(part, KeyPart) and part in node.keys:
                return node.keys[part]
            held = dict(enumerate(node.value)) if isinstance(node.value, list) else node.value
            if not isinstance(held, dict) or part not in held:
                break
            node = held[part]
        return node.line, node.column


def node_of(data: Any) -> Node:
    """Return plain data as a value whose parts are all at the beginning: it is of no file, or of several."""
    if isinstance(data, dict):
        return Node({key: node_of(value) for key, value in data.items()}, 1, 1)
    return Node([node_of(item) for item in data] if isinstance(data, list) else data, 1, 1)


def num_nodes(data: Any) -> int:
    """Return how many values a reader counts in plain data: every key, item and container."""
    if isinstance(data, dict):
        return 1 + len(data) + sum(map(num_nodes, data.values()))
    return 1 + sum(map(num_nodes, data)) if isinstance(data, list) else 1


def parse(text: str, name: str) -> Node:
    """Return the single document of ``text``; raises ``InvalidDocument`` with all that is wrong."""
    # A lone surrogate has no UTF-8, and is refused by the parser.
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise InvalidDocument([Problem(file=name, message="the file is larger than 1 MiB")])
    lines = text.split("\n")
    if len(lines) > MAX_LINES or max(map(len, lines)) > MAX_LINE:
        message = f"more than {MAX_LINES} lines, or a line of more than {MAX_LINE} characters"
        raise InvalidDocument([Problem(file=name, message=message)])
    # Pure Python, because the reasons of the C parser have other words.
    yaml = YAML(typ="safe", pure=True)
    builder = _Builder(name)
    try:
        for event in _events(yaml, text):
            builder.take(event)
    except _Stop:
        pass
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        builder.note(f"not YAML: {_plainly(reason)}", mark)
    if builder.problems:
        raise InvalidDocument(builder.problems)
    # An empty file is null: the record says what it expected.
    return builder.root or Node(None, 1, 1)


def _events(yaml: YAML, text: str) -> Iterator[events.Event]:
    """Return the events of a text; whatever the parser raises is a YAMLError."""
    try:
        yield from yaml.parse(text)
    # How ruamel refuses some %YAML directives.
    except (AssertionError, ValueError) as error:
        raise YAMLError(f"a directive is wrong: {error}") from error


def _plainly(reason: str) -> str:
    """Return the parser's reason, with what to do, and without the names of its tokens."""
    if "'\\t'" in reason:
        return f"{reason}; indent with spaces, not tabs"
    if "mapping values are not allowed" in reason:
        return f"{reason}; check the indentation, and quote a text that has a colon in it"
    return next((plainly for start, plainly in _REASONS.items() if reason.startswith(start)), reason)


_REASONS = {
    "expected '<document start>'": "the value above ends before this; check that it is the file that was meant",
    "expected <block end>": "this fits neither the value above nor its end; check the indentation and the quotes",
    "expected the node content": "a value is missing here",
    "expected ',' or ']'": "a list in brackets goes on or ends here; expected ',' or ']'",
    "expected ',' or '}'": "a mapping in braces goes on or ends here; expected ',' or '}'",
}
"""How ruamel.yaml's reasons start, and what they mean in words."""


class _Stop(Exception):
    """Ends a parse whose outcome is settled."""


@attrs.define
class _Open:
    """A container whose end has not come."""

    node: Node
    anchor: str | None
    key: str | None = None
    awaits_value: bool = False


@attrs.define
class _Builder:
    """Builds the tree, event by event."""

    name: str
    root: Node | None = None
    problems: list[Problem] = attrs.field(factory=list)
    open: list[_Open] = attrs.field(factory=list)
    anchors: dict[str, Node] = attrs.field(factory=dict)
    documents: int = 0
    nodes: int = 0

    def note(self, message: str, mark: Any) -> None:
        """Report a problem, and go on."""
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        self.problems.append(Problem(file=self.name, line=line, column=column, message=message))

    def refuse(self, message: str, mark: Any, *, stop: bool = False) -> None:
        """Report a problem; stop reading where there is no going on, or enough is known."""
        self.note(message, mark)
        if stop or len(self.problems) >= MAX_PROBLEMS:
            raise _Stop

    def take(self, event: events.Event) -> None:
        mark = event.start_mark
        if isinstance(event, events.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                self.refuse("a second document; a file holds one", mark, stop=True)
            if event.version is not None:
                self.refuse("a %YAML directive is not allowed; files are YAML 1.2", mark, stop=True)
        elif isinstance(event, events.MappingEndEvent | events.SequenceEndEvent):
            # Anchors count from here: an alias inside its own container would be a circle.
            closed = self.open.pop()
            if closed.anchor:
                self.anchors[closed.anchor] = closed.node
            if self.open:
                self.open[-1].node.size += closed.node.size
        elif isinstance(event, events.AliasEvent):
            node = self.anchors.get(event.anchor)
            if node is None:
                self.refuse(f"the alias *{event.anchor} names nothing that is complete", mark, stop=True)
            assert node is not None
            # With the place of the alias, where a problem of the shared value is reported.
            self._place(attrs.evolve(node, line=mark.line + 1, column=mark.column + 1), mark)
        elif isinstance(event, events.ScalarEvent | events.MappingStartEvent | events.SequenceStartEvent):
            self._open_or_place(event, mark)

    def _open_or_place(self, event: Any, mark: Any) -> None:
        if event.tag is not None:
            self.refuse(f"the tag {event.tag} is not allowed; write plain values", mark)
        line, column = mark.line + 1, mark.column + 1
        if isinstance(event, events.ScalarEvent):
            node = Node(self._scalar(event, mark), line, column)
            self._place(node, mark)
            if event.anchor:
                self.anchors[event.anchor] = node
            return
        node = Node({} if isinstance(event, events.MappingStartEvent) else [], line, column)
        self._place(node, mark)
        # Until this container ends, its anchor names nothing, not an earlier value of that name.
        self.anchors.pop(event.anchor, None)
        self.open.append(_Open(node, event.anchor))
        if len(self.open) > MAX_DEPTH:
            self.refuse(f"nested more than {MAX_DEPTH} deep", mark, stop=True)

    def _place(self, node: Node, mark: Any) -> None:
        """Put a value where the innermost open container wants it."""
        # An alias counts with all that it repeats, so nested aliases cannot expand without bound.
        self.nodes += node.size
        if self.nodes > MAX_NODES:
            self.refuse(f"more than {MAX_NODES} values, aliases expanded", mark, stop=True)
        if not self.open:
            self.root = node
            return
        top = self.open[-1]
        if node.size > 1 or not isinstance(node.value, dict | list):
            # A container that is still open adds its size at its end.
            top.node.size += node.size
        if isinstance(top.node.value, list):
            top.node.value.append(node)
        elif not top.awaits_value:
            top.key, top.awaits_value = self._key(node, top, mark), True
        else:
            # The value of a refused key is read for its own problems only.
            if top.key is not None:
                top.node.value[top.key] = node
            top.awaits_value = False

    def _key(self, node: Node, top: _Open, mark: Any) -> str | None:
        if not isinstance(node.value, str):
            self.refuse(f"a key must be text, got {_shown(node.plain())}", mark)
            return None
        if node.value in top.node.value:
            first = top.node.keys[node.value][0]
            self.refuse(f"the key {_shown(node.value)} is given twice, first in line {first}", mark)
            return None
        top.node.keys[node.value] = (node.line, node.column)
        return node.value

    def _scalar(self, event: events.ScalarEvent, mark: Any) -> Any:
        """Resolve a plain scalar by YAML 1.2's core schema: ``no`` is text, and so is anything quoted."""
        text: str = event.value
        if not event.implicit[0]:
            return text
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _INTEGER.fullmatch(text):
            return int(text)
        if not _NUMBER.fullmatch(text):
            return text
        # 1e999 would read as infinity, which JSON cannot write.
        if math.isinf(number := float(text)):
            shown = text if len(text) <= 40 else f"{text[:20]}... of {len(text)} characters"
            self.refuse(f"the number {shown} is out of range", mark)
        return number


_CONSTANTS = dict.fromkeys(("", "~", "null", "Null", "NULL")) | {
    word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")
}
_INTEGER = re.compile(r"[-+]?[0-9]{1,30}")
_NUMBER = re.compile(r"[-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]{1,3})?")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
