"""The script that shows rows which FlashAttention 3 leaves unwritten, with stand-ins for its kernels, on a CPU."""

import json
import sys
from pathlib import Path
from types import ModuleType

import attrs
import pytest

from support.files import module_at
from support.recorded_kernels import schedule, varlen_attention

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = module_at(BENCHMARKS / "vllm_fa3_rows.py")
    kernels = ModuleType("vllm.vllm_flash_attn")
    kernels.get_scheduler_metadata, kernels.flash_attn_varlen_func = schedule, varlen_attention
    kernels.is_fa_version_supported = lambda version: version == 3
    vllm = ModuleType("vllm")
    vllm.vllm_flash_attn, vllm.__version__ = kernels, "0.33.0"
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    # A closure calls the kernel again with the numbers and the tensors of its capture, as a graph does.
    monkeypatch.setattr(module, "captured", lambda call: call() or call)
    on_cuda, cases = module.measure, tuple(module.cases())
    monkeypatch.setattr(module, "measure", lambda case, kernels, device: on_cuda(case, kernels, "cpu"))
    few = [
        attrs.evolve(case, keys=min(case.keys, 150)) for case in cases if case.num_reqs == 8 and len(case.queries) > 1
    ]
    monkeypatch.setattr(module, "cases", lambda: iter([case for case in few if case.head_size in (64, 128)]))
    return module


def run(script, monkeypatch, tmp_path, *words):
    target = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["vllm_fa3_rows.py", "--output", str(target), *words])
    return script.main(), json.loads(target.read_text("utf-8"))


def test_rows_are_unwritten_where_the_layout_of_the_schedule_differs(script, monkeypatch, tmp_path):
    """Single tokens in graphs for longer queries; a longer query, the capture's maxima and heads of 128 are right."""
    code, found = run(script, monkeypatch, tmp_path)
    assert code == 0
    assert found["summary"]["head sizes with unwritten rows"] == [64]
    for each in found["results"]:
        windowed = each["window"] is not None and each["keys"] > each["window"]
        differ = each["head_size"] == 64 and each["max_query_len"] == 1 and not windowed
        differ &= each["longest"] > 1 or each["window"] is not None
        assert each["layouts_differ"] == differ
        assert each["batch"]["unwritten"] == (each["rows"] if differ else 0)
        assert each["capture"]["unwritten"] == each["batch"]["wrong"] == each["capture"]["wrong"] == 0


def test_kernel_that_is_wrong_without_a_graph_or_breaks_fails_the_script(script, monkeypatch, tmp_path):
    kernels = sys.modules["vllm"].vllm_flash_attn
    kernels.flash_attn_varlen_func = lambda out, **given: out.zero_()
    assert run(script, monkeypatch, tmp_path)[0] == 1
    kernels.flash_attn_varlen_func = None
    code, found = run(script, monkeypatch, tmp_path)
    assert (code, found["results"]) == (1, [])
    assert "not callable" in found["broke"]
    assert run(script, monkeypatch, tmp_path, "--seconds", "-1")[1]["broke"] is None
