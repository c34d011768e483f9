"""Which captured graphs changed from one run to another, and what changed in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypeVar

from capture_planner.records.fingerprint import Fingerprint
from capture_planner.records.text import counted

MAX_KERNELS = 4
"""Kernels that a sentence names."""

Key = TypeVar("Key")


def changed(old: Mapping[Key, Fingerprint], new: Mapping[Key, Fingerprint]) -> Iterator[tuple[Key, str]]:
    """Yield each graph of both runs whose fingerprint differs, with what differs in it."""
    for key, before in old.items():
        after = new.get(key)
        if after is not None and after != before:
            yield key, change_of(before, after)


def change_of(old: Fingerprint, new: Fingerprint) -> str:
    """Describe how one graph differs from another: kernels that came and went, nodes, or only their launch."""
    gone, added = Counter(old.kernels) - Counter(new.kernels), Counter(new.kernels) - Counter(old.kernels)
    parts = []
    if gone and added:
        parts.append(f"{_named(gone)} replaced by {_named(added)}")
    elif gone or added:
        parts.append(f"without {_named(gone)}" if gone else f"also {_named(added)}")
    if old.nodes != new.nodes:
        parts.append(f"{counted(old.nodes, 'node')} became {new.nodes:,}")
    return "; ".join(parts) or "the same kernels with other launch dimensions, arguments' shapes or order"


def _named(kernels: Counter[str]) -> str:
    listed = [f"{name} ({count}x)" for name, count in sorted(kernels.items())]
    rest = [f"{len(listed) - MAX_KERNELS} more"] if len(listed) > MAX_KERNELS else []
    return ", ".join([*listed[:MAX_KERNELS], *rest])
