"""Make every plan in ``plans/locked`` again, from ``plans/specs``.

``NAME.ENVIRONMENT.yaml`` is the spec ``NAME`` planned for ``ENVIRONMENT``. To add a plan, make it once by hand:
``capture-planner plan plans/specs/NAME.yaml -o plans/locked/NAME.ENVIRONMENT.yaml``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from capture_planner import codec
from capture_planner.codec import shipped as catalog
from capture_planner.planning.planner import plan
from capture_planner.plugins import registry

PLANS = Path(__file__).parent.parent / "plans"


def locked_plans() -> Iterator[tuple[Path, str]]:
    """Yield each locked plan's file with the text that its spec gives now."""
    backends = registry.load_backends()
    for path in sorted((PLANS / "locked").glob("*.yaml")):
        # A spec's name may have dots, as ``llama-3.1-8b``; an environment's has none.
        name, _, environment = path.stem.rpartition(".")
        spec = codec.load_spec(PLANS / "specs" / f"{name}.yaml")
        yield path, codec.dumps(plan(spec, catalog.find_environment(environment), backends))


def main() -> None:
    """Write each plan that changed, and print its name."""
    for path, text in locked_plans():
        if path.read_text("utf-8") != text:
            codec.write(path, text)
            sys.stdout.write(f"changed {path.name}\n")


if __name__ == "__main__":
    main()
