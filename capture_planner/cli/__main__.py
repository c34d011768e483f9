"""``python -m capture_planner.cli``."""

from capture_planner.cli import main

main()
