"""A reading of a device's memory, around captures. Plain data, no torch."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Reading:
    """Memory of a device at one moment, when nothing runs and no freed block is cached."""

    used: int
    """Bytes in use by all processes, as the device reports them."""
    held: int
    """Bytes of all segments of the caching allocator, in pools of graphs and outside."""

    @property
    def outside(self) -> int:
        """Bytes outside the allocator: modules, handles, executable graphs, other processes."""
        return self.used - self.held
