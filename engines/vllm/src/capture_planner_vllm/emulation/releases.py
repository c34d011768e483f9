"""The releases of vLLM that are emulated, and what each has otherwise than the next newer one.

Code and tables follow the newest. ``releases.json`` has, for every older release, the difference: ``flags`` and
``names``, recorded from its wheel by ``tests/engines/oracle/record_vllm.py``, and ``lacks``, the rules of newer
releases that it does not have, each with a sentence and its place in vLLM. Rules ask with ``has``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from capture_planner.engines.history import json_table

NEWEST = "0.33.0"
_followed = ContextVar("release of vLLM", default=NEWEST)


def differences() -> dict[str, dict[str, Any]]:
    """Return the content of ``releases.json``: older releases, newest first."""
    return json_table(__package__, "releases.json")


def releases() -> tuple[str, ...]:
    """Return all releases that can be followed, newest first."""
    return (NEWEST, *differences())


def followed() -> str:
    """Return the release that the emulation follows now."""
    return _followed.get()


def minor() -> str:
    """Return the followed release as messages name it: ``0.33``."""
    return followed().rpartition(".")[0]


@contextmanager
def following(release: str) -> Iterator[None]:
    """Follow a release of ``releases()`` while the context lasts; raises ``KeyError`` for another."""
    if release not in releases():
        raise KeyError(release)
    token = _followed.set(release)
    try:
        yield
    finally:
        _followed.reset(token)


def has(rule: str) -> bool:
    """Say whether the followed release has a rule; raises ``KeyError`` for one that no release lacks."""
    if not any(rule in each["lacks"] for each in differences().values()):
        raise KeyError(rule)
    return all(rule not in each["lacks"] for each in differences_to(followed()))


def differences_to(release: str) -> Sequence[dict[str, Any]]:
    """Return the differences that lead from the newest release to this one, in that order."""
    return [differences()[each] for each in releases()[1 : releases().index(release) + 1]]
