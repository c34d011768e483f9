"""Files in: text -> places -> records, read and parsed once, with every problem of a file at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import attrs
from cattrs.errors import ClassValidationError

from capture_planner.codec.converter import CONVERTER, problems_of
from capture_planner.codec.documents import MAX_BYTES, MAX_KEY, MAX_PROBLEMS, Node, parse
from capture_planner.errors import InvalidDocument, InvalidValue, Problem
from capture_planner.records.environment import Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile
from capture_planner.records.spec import SCHEMA_VERSION, Spec
from capture_planner.records.traffic import Traffic

T = TypeVar("T")

_CALLED: Mapping[type, str] = {
    Spec: "a spec",
    Plan: "a plan",
    Observation: "an observation",
    Traffic: "traffic",
    Profile: "a profile",
}


def structure(data: Any, kind: type[T]) -> T:
    """Return the record of ``kind`` that plain data stands for; raises ``InvalidValue`` with every problem."""
    try:
        return CONVERTER.structure(data, kind)
    except (ClassValidationError, InvalidValue) as error:
        raise InvalidValue(problems_of(error)) from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object whose keys are each given once, as ``object_pairs_hook``; raises ``InvalidValue``."""
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise InvalidValue([Problem(path=(key,), message="is given twice")])
        data[key] = value
    return data


@attrs.frozen
class Document:
    """A file that was read and parsed: a record can be made of it, and problems get their place in it."""

    name: str
    """The path, as messages name it."""
    node: Node

    @classmethod
    def parse(cls, text: str, name: str) -> Document:
        """Parse YAML or JSON text; raises ``InvalidDocument`` with everything wrong in its syntax."""
        return cls(name, parse(text, name))

    @classmethod
    def read(cls, path: str | Path) -> Document:
        """Read and parse a file; raises ``InvalidDocument``."""
        return cls.parse(read(path), str(path))

    @property
    def is_plan(self) -> bool:
        """Whether it is a plan: it names its spec, also where it was cut off; its roles are a list, no mapping."""
        roles = self._top.get("roles")
        return "spec" in self._top or (roles is not None and isinstance(roles.value, list) and not self.is_observation)

    @property
    def is_observation(self) -> bool:
        """Whether it is an observation: it names an engine, and no other kind of file does."""
        return "engine" in self._top

    @property
    def is_traffic(self) -> bool:
        """Whether it is traffic: it has batches at its top, and no other kind of file does."""
        return "batches" in self._top

    @property
    def is_profile(self) -> bool:
        """Whether it is a profile: it has curves, and no other kind of file does."""
        return "curves" in self._top

    @property
    def kind(self) -> type[Spec] | type[Plan] | type[Observation] | type[Traffic] | type[Profile]:
        """What it looks like, by its keys alone: a spec, unless the keys of another kind are there."""
        if self.is_traffic:
            return Traffic
        if self.is_profile:
            return Profile
        return Observation if self.is_observation else Plan if self.is_plan else Spec

    @property
    def _top(self) -> dict[str, Node]:
        return self.node.value if isinstance(self.node.value, dict) else {}

    def load(self, kind: type[T]) -> T:
        """Return the record of ``kind`` in the file; raises ``InvalidDocument`` with every problem in it."""
        # First, because a newer schema would show as many unknown keys.
        version = self._top.get("version")
        if version is not None and type(version.value) is int and version.value > SCHEMA_VERSION:
            message = f"schema version {version.value}, but this capture-planner reads {SCHEMA_VERSION}"
            problem = Problem(path=("version",), message=message, remedy="upgrade capture-planner")
            raise InvalidDocument(self.place([problem]))
        # Without a model, which all kinds but traffic have, the missing keys say more than this would.
        if kind in _CALLED and self.kind is not kind and ("model" in self._top or self.is_traffic):
            message = f"this is {_CALLED[self.kind]}, not {_CALLED[kind]}"
            remedy = "show, explain, check, compare and diff take observations" if self.is_observation else ""
            remedy = "give the spec that it was made from" if self.is_plan and kind is Spec else remedy
            raise InvalidDocument(self.place([Problem(message=message, remedy=remedy)]))
        if kind is Spec and "model" not in self._top and "model_type" in self._top:
            remedy = f"write a spec from it first: capture-planner init {self.name}"
            raise InvalidDocument(
                self.place([Problem(message="this is a model's config.json, not a spec", remedy=remedy)])
            )
        try:
            return structure(self.node.plain(), kind)
        except InvalidValue as error:
            raise InvalidDocument(self.place(error.problems)) from None

    def place(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return problems with the file, line and column of their paths, in the order of the file."""
        located = []
        for problem in problems:
            line, column = self.node.locate(problem.path)
            path = tuple(part[:MAX_KEY] if isinstance(part, str) else part for part in problem.path)
            located.append(attrs.evolve(problem, path=path, file=self.name, line=line, column=column))
        located.sort(key=lambda problem: (problem.line or 0, problem.column or 0))
        if len(located) <= MAX_PROBLEMS:
            return located
        more = Problem(file=self.name, message=f"{len(located) - MAX_PROBLEMS} more problems, which are not listed")
        return [*located[:MAX_PROBLEMS], more]


def read(path: str | Path) -> str:
    """Return the text of a file; raises ``InvalidDocument`` where it cannot be read or is too large."""
    # ``Path("")`` is the working directory.
    if not str(path).strip() or path == Path():
        raise InvalidDocument([Problem(message=f"{str(path)!r} names no file", remedy="give the path of one")])
    try:
        with Path(path).open("rb") as file:
            return read_stream(file, str(path))
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise InvalidDocument([Problem(file=str(path), message=message)]) from error


def read_stream(file: BinaryIO, name: str) -> str:
    """Return the text of an open file, read no further than the size limit; messages call it ``name``.

    Raises ``InvalidDocument``, and ``OSError`` where the file cannot be read.
    """
    # One byte more tells a larger file from one of the largest size.
    content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise InvalidDocument([Problem(file=name, message="the file is larger than 1 MiB")])
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text, at byte {error.start}"
        raise InvalidDocument([Problem(file=name, message=message)]) from error


def load_spec(path: str | Path) -> Spec:
    """Read a spec file; raises ``InvalidDocument`` with every problem in it."""
    return Document.read(path).load(Spec)


def load_environment(path: str | Path) -> Environment:
    """Read an environment file; raises ``InvalidDocument`` with every problem in it."""
    return Document.read(path).load(Environment)


def load_plan(path: str | Path) -> Plan:
    """Read a plan file; raises ``InvalidDocument`` with every problem in it."""
    return Document.read(path).load(Plan)


def load_observation(path: str | Path) -> Observation:
    """Read an observation file; raises ``InvalidDocument`` with every problem in it."""
    return Document.read(path).load(Observation)


def load_traffic(path: str | Path) -> Traffic:
    """Read a traffic file; raises ``InvalidDocument`` with every problem in it."""
    return Document.read(path).load(Traffic)


def load_profile(path: str | Path) -> Profile:
    """Read a profile file; raises ``InvalidDocument`` with every problem in it."""
    return Document.read(path).load(Profile)


def loads(text: str, kind: type[T], name: str = "<text>") -> T:
    """Read a record of ``kind`` from YAML (or JSON) text; raises ``InvalidDocument``."""
    return Document.parse(text, name).load(kind)


def load_measurements(source: Document | str | Path) -> Measurements | None:
    """Return the traffic and the profile that a spec's ``sizes`` names, or None where it names neither.

    Paths are relative to the spec's folder, for standard input to the working directory. Raises ``InvalidDocument``:
    a file that is missing, or one of the two not named, has its place in the spec; what is wrong inside a file, in it.

    :param source: the spec: a document, or the path of its file.
    """
    document = source if isinstance(source, Document) else Document.read(source)
    sizes = document.load(Spec).sizes
    names = {"traffic": sizes.traffic, "profile": sizes.profile}
    if not any(names.values()):
        return None
    folder, problems, files = Path(document.name).parent, [], {}
    for name, value in names.items():
        if value is None:
            problems.append(
                Problem(path=("sizes",), message=f"measured sizes need a {name}", remedy=f"give {name} too")
            )
        # Checked before it is read, so that the problem is at its line of the spec.
        elif not (folder / value).is_file():
            message = f"no such file: {folder / value}"
            remedy = f"write it with `capture-planner {name}`; the path is relative to the spec"
            problems.append(Problem(path=("sizes", name), message=message, remedy=remedy))
        else:
            files[name] = folder / value
    if problems:
        raise InvalidDocument(document.place(problems))
    return Measurements(traffic=load_traffic(files["traffic"]), profile=load_profile(files["profile"]))
