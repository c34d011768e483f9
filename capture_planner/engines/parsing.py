"""An ``argparse`` parser whose refusals say what was wrong with which flag, and what to write."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

from capture_planner.engines.history import History
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
    """Return the known name of which a name is a slip of the keyboard; empty where none is.

    Dashes, underscores and letter case do not count. Names with other digits mean something else.
    """
    plain = {_plain(each): each for each in known}
    given = _plain(name)
    found = difflib.get_close_matches(given, plain, n=1, cutoff=0.8)
    return plain[found[0]] if found and re.sub(r"\D", "", found[0]) == re.sub(r"\D", "", given) else ""


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "leave it out") -> str:
    """Return the remedy for a name that there is not."""
    found = near(name, known)
    return f"did you mean {found}?" if found else otherwise


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]+", "", name).lower()


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
    """Remedies by the name of the type that an argument was expected to have."""
    placing: ClassVar[str]
    """Remedy for a word that belongs to no flag."""
    history: ClassVar[History]
    """Flags of older releases and of other engines, with what to write here."""

    def __init__(self, **options: Any) -> None:
        # Each flag that is added makes a formatter, which asks for the terminal's size unless it has one.
        super().__init__(formatter_class=partial(argparse.HelpFormatter, width=80), **options)

    def refuse_gone(self, words: Sequence[str], newer: Sequence[Problem] = ()) -> None:
        """Raise ``FlagError`` for each flag that the release no longer has, and for ``newer`` ones, not there yet."""
        problems = [*newer, *self.history.gone(words, self.engine)]
        if problems:
            raise FlagError(problems)

    def error(self, message: str) -> NoReturn:
        """Raise ``FlagError`` with the flag, the parser's reason, and what to write in place of it."""
        # argparse: "unrecognized arguments: --max-seqs 4", all words in one message.
        if message.startswith("unrecognized arguments: "):
            raise FlagError(self.strangers(message.partition(": ")[2].split(" ")))
        # argparse: "ambiguous option: --max could match --max-num-seqs, --max-model-len".
        if message.startswith("ambiguous option: "):
            flag, _, fitting = message.removeprefix("ambiguous option: ").partition(" could match ")
            flag = flag.partition("=")[0]
            says = f"{self.engine}'s parser stops: it is ambiguous, short for {fitting}"
            raise refusal(flag, says, "write one of them out")
        # argparse: "argument --max-num-seqs/-n: invalid int value: 'x'".
        flag, _, reason = message.removeprefix("argument ").partition(": ")
        if not reason:
            raise FlagError([Problem(message=f"{self.engine}'s parser stops: {message}")])
        # The long name is clearer than the letter.
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
        # Flag and value in one quoted word, which argparse takes for a flag of that name.
        if " " in flag:
            message = f"{self.engine} takes flag and value in one word only with = between them"
            return Problem(path=(flag.split()[0],), message=message, remedy="write flag and value as two words")
        return Problem(path=(flag,), message=f"{self.engine} has no such flag", remedy=did_you_mean(flag, known))

    def _extra(self, word: str) -> Problem:
        known = self._option_string_actions
        as_flag = "--" + re.sub(r"^\W+", "", word)
        # Word processors turn two dashes into one long one.
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
        # argparse: "invalid choice: 'x' (choose from ...)".
        if reason.startswith("invalid choice: ") and action is not None and action.choices:
            given = reason.partition(": ")[2].partition(" (choose")[0].strip("'\"")
            found = near(given, map(str, action.choices))
            return f"did you mean {found}?" if found else "give one of them"
        kind, _, given = reason.removeprefix("invalid ").partition(" value: ")
        several = action is not None and action.nargs in ("+", "*")
        return number_remedy(given[1:-1], several=several) or self.wanted.get(kind, "")
