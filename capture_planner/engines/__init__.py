"""Engines as they plan and dispatch: emulated from their own flags, checked, compared, and exported to.

Needs neither the engine nor a GPU. Each engine is a plugin: a distribution whose hook returns an ``Engine``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import attrs

from capture_planner.engines import hookspecs
from capture_planner.engines.command_line import LineReading, read_line, server_command, server_commands, with_unset
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.engine import Engine
from capture_planner.engines.shell import ShellCommand
from capture_planner.errors import EngineError, FlagError, InvalidValue
from capture_planner.plugins.discovery import Implementation, duplicate, guarded, implementations, left_out, unknown
from capture_planner.records.environment import Environment

__all__ = [
    "Component",
    "Emulation",
    "Engine",
    "components",
    "emulate",
    "emulate_line",
    "engines",
    "find_engine",
    "is_engine",
    "load_engines",
    "read",
    "server",
    "servers",
]

INSTALL = "install an engine from a clone of capture-planner, such as: python -m pip install engines/vllm"


def load_engines(*plugins: object, installed: bool = True, named: str | None = None) -> Mapping[str, Implementation]:
    """Return the engines of the installed plugins and of ``plugins`` (modules or objects), by name.

    An installed plugin that cannot be imported, whose hook fails or that brings no ``Engine`` is left out with a
    ``PluginWarning``, and so are installed engines of a name that is taken; one of ``plugins`` raises ``EngineError``,
    which names it. With ``named`` only entry points of that name are loaded, where there are any.
    """
    by_name: dict[str, Implementation] = {}
    taken: set[str] = set()
    hook = "capture_planner_engines"
    for item in implementations(hookspecs, hook, EngineError, plugins, installed=installed, named=named):
        with left_out(EngineError, item.installed), guarded(f"the plugin {item.distribution}", EngineError):
            if not isinstance(item.value, Engine):
                remedy = "return values of capture_planner.engines.engine.Engine"
                raise EngineError(f"{item.distribution}: {item.value!r} is not an engine; {remedy}")
            name = item.value.name
            # Which of two plugins to take is not ours to say: neither is.
            if by_name.setdefault(name, item) is not item:
                taken.add(name)
                raise EngineError(duplicate("engine", name, by_name[name].distribution, item.distribution))
    # By name, so that messages do not depend on the order of installation.
    return {name: item for name, item in sorted(by_name.items()) if name not in taken}


@functools.cache
def engines() -> Mapping[str, Implementation]:
    """Return the installed engines by name; they are loaded at the first call."""
    return load_engines()


@functools.cache
def _installed(name: str) -> Mapping[str, Implementation]:
    """Return the installed engines, or the one that a distribution declares by name: an answer needs no other."""
    found = load_engines(named=name)
    # A plugin may name its entry point otherwise than its engine.
    return found if name in found else engines()


def _others(name: str) -> Iterator[Engine]:
    """Yield the other engines, for a line that starts none of this one's programs."""
    base = name.partition("==")[0]
    yield from (item.value for each, item in engines().items() if each != base)


def is_engine(word: str) -> bool:
    """Return whether a word names an installed engine, with or without a release: ``vllm``, ``vllm==0.32``."""
    name = word.partition("==")[0]
    return name in _installed(name)


def find_engine(name: str) -> Engine:
    """Return an installed engine, of the release that ``vllm==0.32`` names, or else the newest that is emulated.

    A release that is not emulated may have a table of its numbers, which answers for it. Raises ``EngineError`` for an
    unknown name, with what is installed, and for a release with neither.
    """
    base, pinned, release = name.partition("==")
    found = _installed(base)
    if base not in found:
        raise EngineError(f"{unknown('engine', base, found)}; {INSTALL}")
    engine: Engine = found[base].value
    every = (engine, *engine.older)
    if not pinned:
        return engine
    # The table of still older ones is read where one of them is meant.
    fitting = _of_release(every, release) or _of_release(engine.by_table(), release)
    if fitting:
        return fitting[0]
    known, tabled = " and ".join(each.version for each in every), engine.by_table()
    also = f"; a table has {tabled[-1].version} to {tabled[0].version}" if tabled else ""
    raise EngineError(f"{base} {release} is not emulated, {known} {'is' if len(every) == 1 else 'are'}{also}")


def _of_release(every: Sequence[Engine], release: str) -> list[Engine]:
    """Return the engines that a release names, the one of exactly that first: ``0.3`` is not 0.33."""
    fitting = [each for each in every if f"{each.version}.".startswith(f"{release}.")]
    return sorted(fitting, key=lambda each: each.version != release)


def read(name: str, words: Sequence[str]) -> LineReading:
    """Return an engine's words in what people paste; raises ``FlagError`` where not exactly one command starts it."""
    return read_line(find_engine(name), words, _others(name))


def server(name: str, words: Sequence[str]) -> ShellCommand:
    """Return the one server of an engine that words start, with its place in their file; raises ``FlagError``."""
    return server_command(find_engine(name), words, _others(name))


def servers(name: str, words: Sequence[str]) -> tuple[ShellCommand, ...]:
    """Return the servers of an engine that words start; raises ``FlagError`` where they start none."""
    return server_commands(find_engine(name), words, _others(name))


@attrs.frozen(kw_only=True)
class Component:
    """One server of a file that starts several, or the only one."""

    words: tuple[str, ...]
    """What ``emulate`` takes for it."""
    name: str = ""
    """As in the file; empty for the only one."""
    line: int = 1


def components(name: str, words: Sequence[str]) -> tuple[Component, ...]:
    """Return the servers that words start, one for each component of a file; raises ``FlagError`` for none."""
    # Standard input can be read once.
    if len(words) != 1 or words[0] == "-":
        return (Component(words=tuple(words)),)
    found = servers(name, words)
    if len(found) < 2 or not all(each.component for each in found):
        return (Component(words=tuple(words), line=found[0].line),)
    return tuple(
        Component(words=(f"{words[0]}#{each.component}",), name=each.component, line=each.line) for each in found
    )


def emulate(name: str, flags: Sequence[str], environment: Environment) -> Emulation:
    """Emulate an engine with any words that ``read`` takes, on a machine; raises ``FlagError`` for flags it refuses."""
    return emulate_line(name, read(name, flags), environment)


def emulate_line(name: str, line: LineReading, environment: Environment) -> Emulation:
    """Emulate the words of a line that was read, as ``emulate``."""
    engine = find_engine(name)
    try:
        emulation = engine.emulate(line.words, environment)
    except FlagError as error:
        raise with_unset(error, line.words) from None
    except InvalidValue as error:
        # Our own records have bounds that the engine does not have; its flags are what the user knows.
        places = dict(zip(("max_num_reqs", "max_num_tokens", "num_tokens"), engine.limits, strict=True))
        raise FlagError(
            attrs.evolve(
                problem,
                path=(places.get(str(problem.path[-1]), engine.limits[0]),) if problem.path else (),
                message=f"{name} may accept it, but capture-planner does not: {problem.message}",
                remedy=problem.remedy or "reduce it",
            )
            for problem in error.problems
        ) from None
    return attrs.evolve(
        emulation,
        assumptions=(*line.assumptions, *emulation.assumptions),
        of_line=line.assumptions,
        notes=(*line.notes, *emulation.notes),
    )
