"""Scratch memory that captured graphs read: it may not grow once it is locked."""

from types import SimpleNamespace

_manager = SimpleNamespace(_locked=False, size=0)


def require(size):
    """Grow the workspace."""
    if size > _manager.size:
        assert not _manager._locked, "Workspace is locked"
        _manager.size = size
