"""Where the plugin's lines go, and what vLLM's own lines say about its graph modes."""

from __future__ import annotations

import functools
import logging
import re

from capture_planner.engines import inside

LOG = logging.getLogger("capture_planner.vllm")

report = functools.partial(inside.report, LOG)
"""``engines.inside.report`` to ``LOG``."""


class ModeReasons(logging.Handler):
    """Remembers what an engine logs about its graph modes, which is the only place where it gives its reasons."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if re.search("cuda_?graph", text, re.IGNORECASE) and text not in self._lines:
            self._lines.append(text)

    def of(self, mode: str) -> str:
        """Return the last line that ends in that mode, or nothing."""
        chosen = re.compile(rf"(?:=|\bto )(?:CUDAGraphMode\.)?{mode}\b")
        # vLLM rewrites a mode several times; the last rewrite is the one that holds.
        return next((line for line in reversed(self._lines) if chosen.search(line)), "")

    def listen(self, *names: str) -> None:
        """Attach to the loggers of those names, once."""
        for name in names:
            logger = logging.getLogger(name)
            if self not in logger.handlers:
                logger.addHandler(self)
