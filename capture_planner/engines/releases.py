"""Releases of an engine: some are emulated, and a table has the numbers of older ones.

Code and tables of an emulation follow the newest release. ``releases.json`` next to it has, for each older release that
is emulated, what it has otherwise than the next newer one. ``by_release.yaml`` is made from the wheels of many releases
by ``tools/release_table.py``: ceilings, defaults and limits, the first release with each flag, and which parts of the
code differ. Of a release that only the table has, an answer rests on both, and says whose code is not known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from importlib import resources
from typing import Any, TypeVar

import attrs

from capture_planner.engines.emulation import Emulation
from capture_planner.engines.engine import Engine
from capture_planner.engines.history import History, json_table, release_of, values_behind
from capture_planner.errors import Problem
from capture_planner.records.environment import Environment

T = TypeVar("T")


class Releases:
    """The releases of one engine; its ``package`` has ``releases.json`` and ``by_release.yaml``."""

    def __init__(self, name: str, package: str, newest: str) -> None:
        self.name, self.newest, self._package = name, newest, package
        # Threads may follow different releases at once.
        self._followed = ContextVar(f"release of {name}", default=newest)

    def differences(self) -> dict[str, dict[str, Any]]:
        """Return the content of ``releases.json``: older releases, newest first."""
        return json_table(self._package, "releases.json")

    @cached_property
    def table(self) -> Mapping[str, Any]:
        """The content of ``by_release.yaml``; only answers for older releases read it."""
        # Of the engines' distributions, and seldom needed.
        import yaml

        text = (resources.files(self._package) / "by_release.yaml").read_text(encoding="utf-8")
        content: dict[str, Any] = yaml.safe_load(text)
        return content

    def emulated(self) -> tuple[str, ...]:
        """Return the releases whose rules are emulated, newest first."""
        return (self.newest, *self.differences())

    def by_table(self) -> tuple[str, ...]:
        """Return the older releases that only the table has, newest first."""
        # The table has the emulated releases, too.
        oldest = _number(self.emulated()[-1])
        return tuple(each for each in self.table["releases"] if _number(each) < oldest)

    def engine(self, newest: Engine) -> Engine:
        """Return the engine of the newest release with those of the older ones, which differ in their emulation."""

        def older(release: str) -> Engine:
            def emulate(command: Sequence[str], environment: Environment) -> Emulation:
                with self.following(release):
                    return newest.emulate(command, environment)

            return attrs.evolve(newest, version=release, emulate=emulate)

        emulated = tuple(map(older, self.emulated()[1:]))
        return attrs.evolve(newest, older=emulated, by_table=lambda: tuple(map(older, self.by_table())))

    def followed(self) -> str:
        """Return the release that the emulation follows now."""
        return self._followed.get()

    def minor(self) -> str:
        """Return the followed release as messages name it: ``0.33``."""
        return self.followed().removesuffix(".0")

    @contextmanager
    def following(self, release: str) -> Iterator[None]:
        """Follow a release while the context lasts; raises ``KeyError`` for one that is neither emulated nor tabled."""
        if release not in self.emulated() and release not in self.by_table():
            raise KeyError(release)
        token = self._followed.set(release)
        try:
            yield
        finally:
            self._followed.reset(token)

    def base(self) -> str:
        """Return the release whose rules are followed: the one that is asked for, or the oldest that is emulated."""
        followed = self.followed()
        return followed if followed in self.emulated() else self.emulated()[-1]

    def has(self, rule: str) -> bool:
        """Say whether the followed release has a rule; raises ``KeyError`` for one that no release lacks."""
        # A rule that no release lacks is a slip in the code that asks.
        if not any(rule in each["lacks"] for each in self.differences().values()):
            raise KeyError(rule)
        return all(rule not in each["lacks"] for each in self.differences_to(self.base()))

    def differences_to(self, release: str) -> Sequence[dict[str, Any]]:
        """Return the differences that lead from the newest release to an emulated one, in that order."""
        every = self.emulated()
        return [self.differences()[each] for each in every[1 : every.index(release) + 1]]

    def value(self, name: str, newest: T) -> T:
        """Return a value of the table for the followed release; that of the newest is in the code."""
        followed = self.followed()
        if followed == self.newest:
            return newest
        rows: Mapping[str, T] = self.table["values"][name]
        # A row holds from its release down to the next one.
        return [value for since, value in rows.items() if _number(since) >= _number(followed)][-1]

    def unknown_parts(self) -> tuple[str, ...]:
        """Return the parts whose code in the followed release is not that of the rules that are followed."""
        base, followed = _number(self.base()), _number(self.followed())
        return tuple(
            part for part, rows in self.table["code"].items() if any(followed <= _number(row) < base for row in rows)
        )

    def assumptions(self, unused: Collection[str] = ()) -> Iterator[str]:
        """Yield what an answer by the table rests on; ``unused``: parts of the code that decide nothing of it."""
        if self.followed() == self.base():
            return
        parts = [part for part in self.unknown_parts() if part not in unused]
        says = f"by the table of {self.minor()}: ceilings, defaults, limits and flags are those of that release"
        rules = f"other rules are those of {self.base()}"
        unknown = f", and what {_listed(parts)} decide is not known, as their code differs" if parts else ""
        yield f"{says}; {rules}{unknown}; observe the engine itself to know it"

    def newer_flags(self, words: Sequence[str]) -> list[Problem]:
        """Return a problem for each flag among words that the followed release does not have yet."""
        if self.followed() == self.newest:
            return []
        since, number = self.table["flags"], _number(self.followed())
        names = [word.partition("=")[0] for word in words]
        return [
            Problem(
                path=(name,),
                message=f"{self.name} {self.minor()} has no such flag; {since[name]} was the first release with it",
                remedy="leave it out",
            )
            for name in names
            if name in since and _number(since[name]) > number
        ]

    def without_gone(self, words: Sequence[str], history: History) -> list[str]:
        """Return words for the rules that are followed: flags that have gone since are called as they are now."""
        if self.followed() == self.newest:
            return list(words)
        found: list[str] = []
        at = 0
        while at < len(words):
            name, equals, value = words[at].partition("=")
            old, at = history.flags.get(name), at + 1
            # The parser refuses what had gone before the followed release.
            if old is None or old.until is None or _number(old.until) < _number(self.followed()):
                found.append(words[at - 1])
                continue
            values = [value] if equals else values_behind(words[at:])
            at += 0 if equals else len(values)
            found += old.written(" ".join(values), alone=len(values) == 1).split()
        return found


def _number(release: str) -> tuple[int, ...]:
    """Return a release as numbers, with that of a ``post`` release."""
    return (*release_of(release.partition(".post")[0]), int(release.partition(".post")[2] or 0))


def _listed(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else "".join(parts)
