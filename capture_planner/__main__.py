"""``python -m capture_planner``, as torchrun starts it."""

from capture_planner.cli import main

main()
