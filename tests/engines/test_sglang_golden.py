"""The emulation of SGLang against answers that SGLang's own functions gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.generators import sglang as drawing
from engines.generators import sglang_answers as answers

_CASES: list[list[Any]] = json.loads((Path(__file__).parent / "golden" / "sglang.json").read_text())


def test_golden_launches_are_many_and_most_start() -> None:
    """The recorded launches are many, and most of them start."""
    started = [case for case in _CASES if case[-1] != "refused"]
    assert len(_CASES) >= 300
    assert len(started) >= 200


@pytest.mark.parametrize("part", range(8))
def test_golden_launches_equal_sglang(part: int, tmp_path: Path) -> None:
    """Sizes, graphs in order of capture, and answers to batches are SGLang's; so are refusals."""
    for device, model, command, file, batches, ranks, answer in _CASES[part::8]:
        case = drawing.Case(command=tuple(command), model=model, device=device, file=file)
        asked = [answers.batch_of(row) for row in batches]
        ours = answers.emulated(drawing.written(case, tmp_path), case.environment, asked, ranks)
        kept: Any = "refused" if "refused" in ours else answers.shortened(ours)
        assert json.loads(json.dumps(kept)) == answer, " ".join(case.command)
