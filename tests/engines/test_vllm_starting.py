"""A start of vLLM under a plan that fails, or comes up: what the log says, and the mark that launch waits for."""

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from capture_planner import codec
from capture_planner.engines import inside
from capture_planner.engines.launch import STARTED
from capture_planner.records._base import digest
from capture_planner_vllm import vllm_plugin
from capture_planner_vllm.inside import hooks, log, seam, starting

FILE = Path(__file__).parents[2] / "plans" / "locked" / "qwen3-8b-eagle3.h100.yaml"


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker of vLLM in a process under a plan, which launch waits for; ``broken`` is the stage that fails."""

    class Worker:
        broken = None

        def load_model(self, *, load_dummy_weights=False):
            return self._stage("load_model")

        def compile_or_warm_up_model(self):
            return self._stage("compile_or_warm_up_model")

        def _stage(self, name):
            if self.broken == name:
                raise RuntimeError("out of memory")
            return name

    module = ModuleType(starting.WORKER)
    module.Worker = Worker
    monkeypatch.setitem(sys.modules, starting.WORKER, module)
    monkeypatch.setattr(inside, "_logged", set())
    monkeypatch.setattr(seam, "_callbacks", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(hooks, "_reasons", log.ModeReasons())
    monkeypatch.setenv(vllm_plugin.PLAN, str(FILE))
    monkeypatch.setenv(STARTED, str(tmp_path / "captured"))
    return Worker


def test_start_that_comes_up_is_marked_at_its_end(worker, tmp_path, caplog):
    """Answers are the worker's own; registering again adds nothing."""
    for _ in range(2):
        vllm_plugin.register()
    assert worker().load_model() == "load_model"
    assert not (tmp_path / "captured").exists()
    assert worker().compile_or_warm_up_model() == "compile_or_warm_up_model"
    assert (tmp_path / "captured").exists()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize("stage", ["load_model", "compile_or_warm_up_model"])
def test_start_that_fails_names_its_plan(worker, tmp_path, caplog, monkeypatch, stage):
    """Once, with what to do; the error is vLLM's."""
    for _ in range(2):
        vllm_plugin.register()
    monkeypatch.setattr(worker, "broken", stage)
    with pytest.raises(RuntimeError, match="out of memory"):
        getattr(worker(), stage)()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert f"vLLM ended in {stage}" in line
    assert f"the plan {FILE} ({digest(codec.load_plan(FILE))[:15]})" in line
    assert "unset CAPTURE_PLANNER_PLAN" in line
    assert not (tmp_path / "captured").exists()


def test_other_worker_starts_as_it_does(worker):
    """One without such stages, and a module without workers."""
    starting.watch(ModuleType("empty"), None, "plan.yaml")
    del worker.load_model
    vllm_plugin.register()
    assert worker().compile_or_warm_up_model() == "compile_or_warm_up_model"
