"""Engine: what a distribution brings to the hook ``capture_planner_engines``."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from capture_planner.engines.deployments import Run
from capture_planner.engines.emulation import Emulation, Emulator
from capture_planner.engines.export import Export
from capture_planner.engines.history import History
from capture_planner.engines.launch import Launch
from capture_planner.measuring.traffic.formats import LogFormats
from capture_planner.modes import Role
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Plan

OTHER_DEVICE = "CAPTURE_PLANNER_OTHER_DEVICE"
"""A variable in front of the flags: what says that the server runs on no NVIDIA GPU, such as an image for ROCm. An
engine that has it in its ``flags`` answers then by the flags alone."""


DYNAMO: Mapping[str, int | str] = {
    **dict.fromkeys(("--is-prefill-worker", "--is-decode-worker", "--enable-local-indexer", "--enable-multimodal"), 0),
    **dict.fromkeys(("--publish-events-and-metrics", "--use-kv-events", "--durable-kv-events"), 0),
    **{"--frontend-decoding": 0, "--multimodal-embedding-cache-capacity-gb": 1},
    **dict.fromkeys(("--request-plane", "--event-plane", "--discovery-backend", "--store-kv", "--endpoint"), 1),
    **dict.fromkeys(("--namespace", "--migration-limit", "--custom-jinja-template", "--modality"), 1),
}
"""Flags of all workers of Dynamo, each with the number of its values; those that begin with ``--dyn-`` have one."""


@attrs.frozen
class FlagChange:
    """Flags to give, in place of what the command line says; written as in ``give --max-num-seqs 64``.

    A name without dashes is a key of the engine's file, and its value one of YAML.
    """

    flags: tuple[tuple[str, tuple[str, ...]], ...]
    instead: bool = False
    """Whether it gives something up, such as requests at once, in place of more graphs."""

    @classmethod
    def of(cls, flag: str, *values: object, instead: bool = False) -> FlagChange:
        """Return the change of one flag."""
        return cls(((flag, tuple(map(str, values))),), instead)

    def __str__(self) -> str:
        return "give " + " and ".join(
            shlex.join((flag, *values)) if flag.startswith("-") else f"{flag}: {values[0]} in the file of --config"
            for flag, values in self.flags
        )


def adding(sizes: Iterable[int], flag: str) -> str:
    """Return in words the change of a list by more sizes."""
    return f"add {' '.join(map(str, sizes))} to {flag}, and keep the others"


def appended(command: Sequence[str], change: FlagChange) -> list[str]:
    """Return a command line with the flags behind the others; where the last one counts, that is enough."""
    return [*command, *(word for flag, values in change.flags for word in (flag, *values))]


def spelled(flag: str) -> str:
    """Return the name of a flag with dashes, without a value behind ``=``."""
    return flag.partition("=")[0].replace("_", "-")


def without_flags(words: Iterable[str], values: Callable[[str], float | None]) -> Iterator[str]:
    """Yield the words without some flags and their values.

    :param values: returns the most values of a flag to leave out; None: the flag stays.
    """
    left: float = 0
    for word in words:
        # A negative number is a value.
        if word.startswith("-") and not word[1:2].isdigit():
            most = values(word)
            left = 0 if most is None or "=" in word else most
            if most is None:
                yield word
        elif left:
            left -= 1
        # Behind the values of a flag may stand the model.
        else:
            yield word


class Fixes:
    """Fixes of findings of ``check``: phrases such as ``raise --max-size to 64``, or "" for that in ``general``."""

    general: ClassVar[Mapping[str, str]] = {}
    """For each rule of ``check``, by code, what to set in general."""

    def changes(self, code: str, emulation: Emulation, role: Role, runs: Sequence[Run]) -> Iterator[FlagChange]:
        """Yield changes of the command line that may remove a finding, the one to prefer first.

        ``check`` emulates them and advises what removes it. A finding without such a change is a note.
        """
        return iter(())

    def applied(self, command: Sequence[str], change: FlagChange) -> list[str]:
        """Return the command line with a change: the flags replace what it says."""
        return appended(command, change)

    def without(self, command: Sequence[str], flags: Iterable[str]) -> list[str]:
        """Return the command line without some flags and their values; here, every word up to the next flag is one."""
        dropped = set(flags)
        return [*without_flags(command, lambda flag: math.inf if spelled(flag) in dropped else None)]

    def after(self, emulate: Emulator, command: Sequence[str], change: FlagChange, machine: Environment) -> Emulation:
        """Emulate a command line with a change; raises ``FlagError`` where the engine refuses it."""
        return emulate(self.applied(command, change), machine)

    def advice(self, code: str, emulation: Emulation, role: Role, about: Any) -> str:
        """Return what to do about a finding, where it can be worked out.

        :param about: the runs of EN001, EN002, EN006 and EN008, the sizes of EN004 that are not captured, the decision
            of EN005, the encoder's graphs of EN009; None of EN003.
        """
        return ""


@attrs.frozen(kw_only=True)
class Engine:
    """One release of an engine; its two functions are pure, and need no engine, GPU, torch or network."""

    name: str
    """As on the command line: ``capture-planner engine NAME``."""
    version: str
    """The release whose rules are emulated."""
    emulate: Emulator
    """Called with the words of the engine's own command line, without the program, and with the machine.

    Exact or not at all: raises ``FlagError`` with one ``Problem`` for each flag that the engine refuses, and
    its subclass ``NotEmulated`` for flags that the engine may accept and whose graphs are not known here.
    Where a fact about the model is missing, ``Emulation.assumptions`` states what is assumed."""
    export: Callable[[Plan], Export]
    """From a plan to the flags that come closest to it, and what they lose. The result is not proved yet:
    ``engines.export.prove`` emulates it and compares every batch. Raises ``DispatchError`` for a plan without a
    target, and ``FlagError`` for one that the engine has no flags for at all."""
    launch: Callable[[Plan, Sequence[str]], Launch] | None = None
    """From a plan and the words of a command line behind the program, to what the command lacks so that the plugin
    inside the engine runs the plan. Raises ``FlagError`` for flags that contradict the plan, with the value to give.
    None: the engine has no such plugin."""
    flags: Mapping[str, str]
    """Each flag that graphs can depend on, with its help in a few words; others are accepted and ignored."""
    programs: tuple[str, ...]
    """Beginnings of a whole command line, in front of the flags, the longest first: ``vllm serve``."""
    wrappers: Mapping[str, Mapping[str, int | str]] = attrs.Factory(dict)
    """Programs among ``programs`` that wrap the server, with the flags that only they have: how many values each has,
    or the engine's own name of it, "" for a word without a flag."""
    limits: tuple[str, str, str]
    """The flags for the most requests, tokens and drafted tokens; named where a value is too large for us."""
    fixes: Fixes = attrs.Factory(Fixes)
    """Fixes of the findings of ``check``."""
    sizes_in_tokens: bool = False
    """Whether ``Emulation.sizes`` counts tokens, shared by all query lengths; else requests."""
    skips_wide_padding: bool = False
    """Whether the engine runs a mixed batch eager on purpose where its graph would pad it far."""
    backends: tuple[tuple[str, str], ...] = ()
    """Names of an attention backend: that of its plugin here, and the engine's own."""
    unemulated_variables: Mapping[str, Sequence[str]] = attrs.Factory(dict)
    """Variables of the environment that can change graphs and are not emulated, each with the values that do not. Those
    that are emulated are among ``flags``; all others decide nothing."""
    history: History = attrs.Factory(History)
    """Other names and defaults of older releases."""
    logs: LogFormats = attrs.Factory(LogFormats)
    """What the engine writes about its batches, in its log and in its metrics."""
    older: tuple[Engine, ...] = ()
    """Older releases that are emulated too, newest first: ``NAME==VERSION`` on the command line."""
    by_table: Callable[[], tuple[Engine, ...]] = tuple
    """Return still older ones, whose answers rest on a table of their numbers, and say so in ``assumptions``."""
    aliases: tuple[str, ...] = ()
    """Other names of the engine and of its program, for suggestions."""
