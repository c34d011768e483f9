"""Four hundred command lines, as TensorRT-LLM's own functions answered them (``record_tensorrt_llm.py``)."""

import itertools
import json
from pathlib import Path

import pytest

from capture_planner.errors import FlagError
from engines.generators import tensorrt_llm as drawn
from engines.generators.tensorrt_llm_answers import emulated, shortened

RECORDED = json.loads((Path(__file__).parent / "golden" / "tensorrt_llm.json").read_text("utf-8"))


def test_golden_answers_are_the_engines(tmp_path):
    """Sizes, graphs in their order, and each answer: alone, and over attention-DP ranks."""
    file = tmp_path / "config.yaml"
    cases = itertools.islice(drawn.cases(RECORDED["seed"]), len(RECORDED["cases"]))
    for case, wanted in zip(cases, RECORDED["cases"], strict=True):
        if "refused" in wanted:
            with pytest.raises(FlagError, match="no size is left"):
                emulated(case, file)
        else:
            assert shortened(emulated(case, file)) == wanted, case


def test_golden_cases_cover_every_kind():
    """Refusals, schedules, hits and misses, and ranks that agree and do not: each many times."""
    answers = [case for case in RECORDED["cases"] if "refused" not in case]
    assert len(answers) >= 300
    assert sum(len(case["shapes"]) > 1 for case in answers) >= 30
    alone = [answer for case in answers for answer in case["alone"]]
    assert min(sum(map(bool, alone)), alone.count(0)) >= 500
    ranks = [any(step) for case in answers for step in case["ranks"]]
    assert min(sum(ranks), ranks.count(False)) >= 30
