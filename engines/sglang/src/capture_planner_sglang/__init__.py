"""SGLang 0.5.23 for capture-planner: the emulation (``engine``), and a plugin for SGLang itself (``sglang_plugin``).

Importing this package imports neither: SGLang imports it in every process, for the plugin.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from capture_planner.engines.engine import Engine


@pluggy.HookimplMarker("capture_planner")
def capture_planner_engines() -> Iterable[Engine]:
    """Return the one engine of this distribution."""
    from capture_planner_sglang.emulation.engine import ENGINE

    return (ENGINE,)
