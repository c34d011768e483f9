"""What the plugins inside engines share: settings, names of files, times of the device, and what they look up and log.

Names no engine, and imports neither one nor torch: a plugin hands over the loggers, functions and events.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from capture_planner.engines.launch import STRICT
from capture_planner.errors import RunError
from capture_planner.records.observation import Observation

_logged: set[str] = set()


def resolve(path: str) -> Any:
    """Return the module, class or function at a dotted path; raises ``ImportError`` or ``AttributeError``."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        try:
            value: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # A module that is there may lack one that it imports; that is not a shorter path to try.
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(path)


def report(logger: logging.Logger, level: int, lines: Sequence[str], cause: Exception | None = None) -> None:
    """Log lines that this process has not logged yet; in strict mode, raise ``RunError`` for warnings and errors."""
    # The same line may come from several hooks, and from several engines of a process.
    for line in lines:
        if line not in _logged:
            _logged.add(line)
            logger.log(level, "%s", line)
    if lines and level > logging.INFO and is_strict():
        raise RunError("\n".join(lines)) from cause


def is_strict() -> bool:
    """Return whether what is only logged becomes an error."""
    return os.environ.get(STRICT) == "1"


K = TypeVar("K")

SECONDS = "CAPTURE_PLANNER_OBSERVE_SECONDS"
"""Names the variable for the seconds between two writes of an observation."""

EVERY = 30.0
"""Default seconds between two writes of an observation."""


def seconds_of(variable: str, default: float, what: str, warn: Callable[[str], object]) -> float:
    """Return the seconds that a variable says; else the default, with a warning that names ``what`` it is for."""
    try:
        seconds = float(os.environ.get(variable) or default)
    except ValueError:
        seconds = -1.0
    if 0 <= seconds < 1e9:  # no NaN
        return seconds
    warn(f"{variable} is no number of seconds: {os.environ[variable]!r}; {what} {default:g} s")
    return default


def file_name(base: Observation, number: int = 1) -> str:
    """Return the name of a worker's file, without its ending; ``number``: of the model runner in this process."""
    # ``measuring.workers`` reads the worker and its process from the name.
    # The first replica has the name that an engine without replicas has.
    replica = f"replica{base.replica}." if base.replica else ""
    return f"{base.engine}.{replica}rank{base.rank}.{os.getpid()}{'' if number == 1 else f'.{number}'}"


def timestamp() -> str:
    """Return the time now, in UTC and to the second, as observations have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class PassClock(Generic[K]):
    """Times of sampled passes by events of the device, read without waiting."""

    def __init__(self, event: Callable[[], Any]) -> None:
        """:param event: makes an event with ``record``, ``query`` and ``elapsed_time``, as ``torch.cuda.Event`` has."""
        self._event = event
        self._open: tuple[K, Any] | None = None
        self._pending: list[tuple[K, Any, Any]] = []

    def start(self, key: K) -> None:
        """Start timing a pass, and stop timing the previous one."""
        self.stop()
        event = self._event()
        event.record()
        self._open = key, event

    def stop(self) -> None:
        """End the time of the open pass, if there is one."""
        if self._open is not None:
            (key, start), self._open = self._open, None
            end = self._event()
            end.record()
            self._pending.append((key, start, end))

    def drop(self) -> None:
        """Forget the open pass."""
        self._open = None

    def passed(self) -> Iterator[tuple[K, float]]:
        """Yield key and milliseconds of each time that the device is done with."""
        pending, self._pending = self._pending, []
        for key, start, end in pending:
            # Waiting for an event would stop the host, which the device needs for the next step.
            if end.query():
                yield key, start.elapsed_time(end)
            else:
                self._pending.append((key, start, end))
