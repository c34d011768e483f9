"""Older releases of an engine: flags with other names, and other defaults; and the JSON files of such tables."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import attrs

from capture_planner.errors import Problem


@cache
def json_table(package: str, file: str) -> dict[str, Any]:
    """Return the content of a file next to a package's modules; it is read once, so do not change it."""
    content: dict[str, Any] = json.loads((resources.files(package) / file).read_text(encoding="utf-8"))
    return content


@attrs.frozen(kw_only=True)
class OldName:
    """A flag, or a field of one, that the emulated release has no more."""

    until: str | None = None
    """The last release with it; None: no release had it, or it is another engine's."""
    now: str = ""
    """The replacement, with ``{}`` for its value; empty: it has no successor."""
    values: Mapping[str, str] = attrs.Factory(dict)
    """Replacements for certain values in lower case, in place of ``now``; ``one``: for any single value."""
    reason: str = "has no such flag"
    """The release's reaction to it."""
    why: str = ""
    """The reason why it can be left out, or a caution."""

    def written(self, text: str, *, alone: bool = True) -> str:
        """Return what to write for a quoted text, ``alone`` if it is one value; empty: it has no successor."""
        # A certain value, then any single value, then whatever was given.
        now = self.values.get(text.lower(), self.values.get("one", self.now) if alone else self.now)
        return now.replace("{}", text) if text else re.sub(r"[ =]?\{\}", "", now)

    def remedy(self, values: Sequence[str] = ()) -> str:
        """Return what to do about a flag with these values."""
        return self.remedy_of(" ".join(map(shlex.quote, values)), alone=len(values) == 1)

    def remedy_of(self, text: str, *, alone: bool = True) -> str:
        """Return what to do about it with a value as it is quoted, as ``written``."""
        now = self.written(text, alone=alone)
        return (f"give {now}" if now else "leave it out") + (f": {self.why}" if self.why else "")


@attrs.frozen(kw_only=True)
class History:
    """The older releases of an engine, as far as command lines show them."""

    flags: Mapping[str, OldName] = attrs.Factory(dict)
    defaults: tuple[tuple[str, str, str], ...] = ()
    """Two releases, and the changed default of those from the first on and before the second."""
    parts: Mapping[str, Mapping[str, OldName]] = attrs.Factory(dict)
    """Fields of flags that are JSON, by the name of the flag: ``compilation_config``."""
    variables: Mapping[str, OldName] = attrs.Factory(dict)
    """Variables of the environment that the release no longer reads, and which meant something for graphs."""
    signs: Mapping[str, str] = attrs.Factory(dict)
    """Variables that the release no longer reads and that mean nothing now, each with the last release that did."""
    image: str = ""
    """A pattern of the engine's images, with the release as its group."""

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> History:
        """Return the history in plain data, as an engine's JSON file has it."""
        return cls(
            flags=old_names(data["flags"]),
            parts={flag: old_names(rows) for flag, rows in data.get("parts", {}).items()},
            variables=old_names(data.get("variables", {})),
            defaults=tuple((since, before, says) for since, before, says in data["defaults"]),
            signs=data.get("signs", {}),
            image=data["image"],
        )

    def gone(self, words: Sequence[str], engine: str) -> list[Problem]:
        """Return a problem for each old flag among words, with its successor, and the age of the line.

        :param engine: its name and release, as in a sentence.
        """
        problems, releases = [], []
        for index, word in enumerate(words):
            name, equals, value = word.partition("=")
            old = self.flags.get(name)
            if old is None:
                continue
            # The remedy shows the new flag with the values that were given.
            values = [value] if equals else values_behind(words[index + 1 :])
            last = "" if old.until is None else f"; {old.until} was the last release with it"
            message = f"{engine} {old.reason}{last}"
            problems.append(Problem(path=(name,), message=message, remedy=old.remedy(values)))
            releases += [] if old.until is None else [old.until]
        if releases:
            # The line is at most as new as the oldest flag in it.
            oldest = min(releases, key=release_of)
            problems += [Problem(message=self.age(oldest, f"the line is for release {oldest} or older"))]
        return problems

    def renewed(self, words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return words as the emulated release has them, for what older ones had; and each change, in words.

        Flags, fields of JSON and variables get their successors; what has none is left out. Only what an older release
        had is changed: the names of other engines and slips are not.
        """
        left, new, changes = list(words), list[str](), list[str]()
        while left:
            word = left.pop(0)
            name, equals, value = word.partition("=")
            head, dot, field = name.partition(".")
            flag = head.replace("_", "-") if head.startswith("--") else head
            table = self.parts.get(_LONG.get(flag, flag).lstrip("-").replace("-", "_"), {})
            old = self.variables.get(name) if equals and not name.startswith("-") else None
            if old is None and not dot:
                old = self.flags.get(flag)
            if old is not None and old.until is not None:
                values = [value] if equals else values_behind(left)
                del left[: 0 if equals else len(values)]
                now = shlex.split(old.written(" ".join(map(shlex.quote, values)), alone=len(values) == 1))
                new += now
                changes.append(f"{name} as {shlex.join(now)}" if now else f"{name} left out")
                continue
            fields = _json_fields(field, value if equals else left[0] if left else "") if table else {}
            gone = {key: table[key] for key in fields if key in table and table[key].until is not None}
            if not gone:
                new.append(word)
                continue
            del left[: 0 if equals else 1]
            written = [gone[key].written(json.dumps(fields[key])) for key in gone]
            kept = {key: each for key, each in fields.items() if key not in gone}
            kept |= json.loads(f"{{{', '.join(filter(None, written))}}}")
            new += [flag, json.dumps(kept)] if kept else []
            changes += [
                f"{key} as {text}" if text else f"{key} left out" for key, text in zip(gone, written, strict=True)
            ]
        return tuple(new), tuple(changes)

    def age(self, release: str, subject: str) -> str:
        """Return what is known of a line of an older release: what differs by default, as far as graphs go."""
        number = release_of(release)
        differs = [says for since, before, says in self.defaults if release_of(since) <= number < release_of(before)]
        return f"{subject}; by default {release} differs: {', '.join(differs)}" if differs else subject

    def release_of_image(self, image: str | None) -> str | None:
        """Return the release that an image's tag names."""
        match = re.search(self.image, image) if image and self.image else None
        return match[1] if match else None


_LONG = {"-cc": "compilation-config", "-O": "compilation-config", "-ac": "attention-config"}
"""Flags of one letter or two, each with the long name."""


def _json_fields(field: str, text: str) -> dict[str, Any]:
    """Return the fields of a flag's JSON, or the one that its dotted name sets; none where it is no object."""
    try:
        # Command lines have Python's spelling of booleans, too.
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        value = text
    if field:
        return {} if "." in field else {field: value}
    return value if isinstance(value, dict) else {}


def old_names(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, OldName]:
    """Return the rows of a JSON file as records."""
    return {name: OldName(**row) for name, row in rows.items()}


def values_behind(words: Sequence[str]) -> list[str]:
    """Return the words up to the next flag."""
    # A minus in front of a digit begins a number, not a flag.
    end = next((at for at, word in enumerate(words) if re.match(r"--?[A-Za-z]", word)), len(words))
    return list(words[:end])


def release_of(text: str) -> tuple[int, ...]:
    """Return a release as numbers: ``0.10.2`` is (0, 10, 2)."""
    return tuple(map(int, re.findall(r"\d+", text)[:3]))
