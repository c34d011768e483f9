"""From a spec, a machine and backends to a plan: modes, sizes, entries, waivers."""

from typing import TYPE_CHECKING

from capture_planner.lazy import lazy_names

if TYPE_CHECKING:
    from capture_planner.planning.planner import plan

__all__ = ["plan"]

__getattr__, __dir__ = lazy_names(__name__, {"planner": ("plan",)})
