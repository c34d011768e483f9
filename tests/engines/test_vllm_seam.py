"""Where the lines of vLLM's plugin go."""

import logging

import pytest

from capture_planner_vllm.inside import seam
from capture_planner_vllm.inside.log import LOG


class Kept(logging.Handler):
    """Keeps the lines that it gets."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("before", ["nothing", "root at WARNING", "root at INFO"])
@pytest.mark.parametrize("again", [False, True])
def test_lines_go_where_the_engines_go(monkeypatch, before, again):
    """Each once, whatever logging a script has set up; also after vLLM has set up its own anew."""
    ours, engine, root = logging.getLogger("capture_planner"), logging.getLogger("vllm"), logging.getLogger()
    scripts, engines = Kept(), Kept()
    monkeypatch.setattr(ours, "parent", ours.parent)
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(engine, "propagate", False)
    monkeypatch.setattr(engine, "handlers", [Kept() if again else engines])
    monkeypatch.setattr(root, "handlers", [] if before == "nothing" else [scripts])
    levels = engine.level, root.level
    root.setLevel(logging.INFO if before == "root at INFO" else logging.WARNING)
    engine.setLevel(logging.INFO)
    LOG.isEnabledFor(logging.INFO)
    seam.log_with("vllm")
    seam.log_with("vllm")
    engine.handlers = [engines]
    LOG.info("a line")
    engine.setLevel(levels[0])
    root.setLevel(levels[1])
    assert (engines.lines, scripts.lines) == (["a line"], [])
