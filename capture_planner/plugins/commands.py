"""Commands that plugins add to the command line, declared so that help and completion import none of them."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import click


@attrs.frozen(kw_only=True)
class Command:
    """A command by the place of its code, which is imported when the command is used."""

    name: str
    """The word after ``capture-planner``."""
    help: str
    """One sentence for ``capture-planner --help``."""
    target: str
    """``package.module:attribute`` of a ``click.Command``."""

    def load(self) -> click.Command:
        """Import the command."""
        command: click.Command = pkgutil.resolve_name(self.target)
        return command
