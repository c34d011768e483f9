"""An ``argparse`` parser whose refusals say what was wrong with which flag, and what to write."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from capture_planner.errors import FlagError, NotEmulated, Problem

REMEDY = "; "
"""Parts what is wrong from what to give, in the ``ArgumentTypeError`` of a type of an engine's own."""

NUMBERS = re.compile(r"[\[(]?\s*-?\d+(?:[\s,;]+-?\d+)+[\s,;]*[\])]?")
"""Several whole numbers in one word."""


def refusal(flag: str, reason: str, remedy: str = "", *inside: str | int) -> FlagError:
    """Return the error for one flag, with a place inside its JSON value where there is one."""
    return FlagError([Problem(path=(flag, *inside), message=reason, remedy=remedy)])


def unfollowed(flag: str, reason: str, remedy: str = "", *inside: str | int) -> NotEmulated:
    """Return the error for a flag that the engine may take and whose graphs are not emulated, as ``refusal``."""
    return NotEmulated(refusal(flag, reason, remedy, *inside).problems)


def near(name: str, known: Iterable[str]) -> str:
    """Return the known name that is nearest, whatever its dashes and underscores; empty where none is near."""
    spelled = {_plain(each): each for each in known}
    plain = _plain(name)
    found = difflib.get_close_matches(plain, spelled, n=1, cutoff=0.7)
    longer = sorted((each for each in spelled if each.startswith(f"{plain}-")), key=len)
    return spelled[(found or longer)[0]] if found or longer else ""


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "leave it out") -> str:
    """Return the remedy for a name that there is not."""
    found = near(name, known)
    return f"did you mean {found}?" if found else otherwise


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]+", "-", name).strip("-").lower()


def number_remedy(text: str, *, several: bool = False) -> str:
    """Return what to do about a text that was to be one number, or ``several``; empty where that says it all."""
    if text == "=":
        return "write it without spaces around ="
    if NUMBERS.fullmatch(text) is None:
        return ""
    return f"give them apart: {' '.join(listed(text))}" if several else "give one number"


def listed(text: str) -> list[str]:
    """Return the whole numbers in a text."""
    return re.findall(r"-?\d+", text)


def as_words(settings: Mapping[Any, Any], is_switch: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Return settings as command-line words: mappings as JSON, without false switches and empty lists."""
    words: list[str] = []
    for name, value in settings.items():
        flag = f"--{name}"
        if isinstance(value, bool) and is_switch(str(name)):
            words += [flag] if value else []
        elif isinstance(value, bool):
            words += [flag, str(value).lower()]
        elif isinstance(value, list):
            words += [flag, *map(str, value)] if value else []
        else:
            words += [flag, json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return words


def json_remedy(text: str) -> str:
    """Return what to do about a text that is no JSON."""
    if text.startswith("{") and not text.rstrip().endswith("}"):
        return "close its braces, and put all of it in single quotes, or the shell takes it apart"
    if re.match(r"[{\[]\s*'", text):
        return "write double quotes inside and single quotes around: '{\"a\": 1}'"
    return "give JSON in single quotes, as in '{\"a\": 1}'"


def not_json(text: str, error: json.JSONDecodeError) -> argparse.ArgumentTypeError:
    """Return the parser's error for a text that is no JSON, with the place in it."""
    return argparse.ArgumentTypeError(f"not JSON at character {error.pos + 1}, {error.msg}: {text!r}")


class Parser(argparse.ArgumentParser):
    """A parser that raises ``FlagError`` where ``argparse`` would print its usage and exit."""

    engine: str
    """The engine's name and release, as in a sentence."""
    wanted: ClassVar[Mapping[str, str]]
    """What to give, by the name of the type that an argument was none of."""
    placing: ClassVar[str]
    """What to do about a word that belongs to no flag."""
    renamed: ClassVar[Mapping[str, str]]
    """Flags of older releases and of other engines, with what to write here."""

    def error(self, message: str) -> NoReturn:
        """Raise ``FlagError`` with the flag, the parser's reason, and what to write in place of it."""
        if message.startswith("unrecognized arguments: "):
            raise FlagError(self.strangers(message.partition(": ")[2].split(" ")))
        if message.startswith("ambiguous option: "):
            flag, _, fitting = message.removeprefix("ambiguous option: ").partition(" could match ")
            flag = flag.partition("=")[0]
            says = f"{self.engine}'s parser stops: it is ambiguous, short for {fitting}"
            remedy = f"give {self.renamed[flag]}" if flag in self.renamed else "write one of them out"
            raise refusal(flag, says, remedy)
        flag, _, reason = message.removeprefix("argument ").partition(": ")
        if not reason:
            raise FlagError([Problem(message=f"{self.engine}'s parser stops: {message}")])
        flag = next(part for part in flag.split("/") if part.startswith("--") or "--" not in flag)
        remedy = self._remedy(flag, reason)
        if not remedy:
            reason, _, remedy = reason.partition(REMEDY)
        raise refusal(flag, f"{self.engine}'s parser stops: {reason}", remedy)

    def strangers(self, words: Sequence[str]) -> list[Problem]:
        """Return the problems of words that the parser does not know: the flags among them, or else the words."""
        flags = [word for word in words if word.startswith("-") and not re.fullmatch(r"-?\d+", word)]
        return [self._unknown(word.partition("=")[0]) for word in flags] or [self._extra(words[0])]

    def _unknown(self, flag: str) -> Problem:
        known = self._option_string_actions
        remedy = f"give {self.renamed[flag]}" if flag in self.renamed else did_you_mean(flag, known)
        return Problem(path=(flag,), message=f"{self.engine} has no such flag", remedy=remedy)

    def _extra(self, word: str) -> Problem:
        known = self._option_string_actions
        as_flag = "--" + re.sub(r"^\W+", "", word)
        if re.match(r"[\u2010-\u2015\u2212]", word) or as_flag in known:
            remedy = f"write two plain dashes in front: {near(as_flag, known) or as_flag}"
        else:
            remedy = self.placing
        return Problem(path=(word,), message=f"{self.engine} takes no such word here", remedy=remedy)

    def _remedy(self, flag: str, reason: str) -> str:
        action = self._option_string_actions.get(flag)
        if "expected" in reason and "argument" in reason:
            return "give its value behind it"
        if reason.startswith("ignored explicit argument"):
            return "it is a switch: write it without a value"
        if reason.startswith("not JSON at "):
            return json_remedy(reason.partition(": ")[2][1:-1])
        if reason.startswith("invalid choice: ") and action is not None and action.choices:
            given = reason.partition(": ")[2].partition(" (choose")[0].strip("'\"")
            found = near(given, map(str, action.choices))
            return f"did you mean {found}?" if found else "give one of them"
        kind, _, given = reason.removeprefix("invalid ").partition(" value: ")
        several = action is not None and action.nargs in ("+", "*")
        return number_remedy(given[1:-1], several=several) or self.wanted.get(kind, "")
