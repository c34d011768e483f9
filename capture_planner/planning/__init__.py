"""From a spec, a machine and backends to a plan: modes, sizes, entries, waivers."""

from capture_planner.planning.planner import plan

__all__ = ["plan"]
