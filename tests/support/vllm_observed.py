"""A vLLM of stand-ins, observed: how it starts, steps, and what its own log says."""

import importlib
import os
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.engines import inside
from capture_planner.engines.inside import SECONDS
from capture_planner.engines.launch import OBSERVE, PROFILE, STRICT
from capture_planner_vllm.inside import device, observe
from capture_planner_vllm.inside import observe_seams as seams
from capture_planner_vllm.inside.starting import WORKER

STANDIN = Path(__file__).parents[1] / "engines" / "standin"
PLAN = codec.load_plan(Path(__file__).parents[2] / "plans" / "locked" / "qwen3-8b-eagle3.h100.yaml")


MEMORY = 1 << 40
"""Bytes of the device."""

INDEX = 0
"""The index of the replica, where it is one of several that share nothing."""


class Event:
    """A CUDA event whose time is the count of events before it; it has passed once ``ready`` says so."""

    clock, ready = 0, True

    def record(self):
        Event.clock += 1
        self.at = Event.clock

    def query(self):
        return Event.ready

    def elapsed_time(self, other):
        return float(other.at - self.at)


def _taken():
    """The bytes of all graphs that something refers to."""
    module = sys.modules.get("vllm.compilation.cuda_graph")
    return 0 if module is None else sum(graph.num_tokens for graph in module.Graph.live) << 20


def forget_vllm():
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@contextmanager
def process(**environment):
    """A process that can import the stand-in as vLLM, and observes into the folder that it gives."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    forget_vllm()
    # Tests set variables for later engines, too, so all variables are restored.
    variables = mock.patch.dict(os.environ)
    with variables, pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.syspath_prepend(str(STANDIN))
        for name in (STRICT, PROFILE, SECONDS):
            os.environ.pop(name, None)
        os.environ.update({OBSERVE: folder} | environment)
        patch.setattr(device, "event", Event)
        patch.setattr(device, "free_memory", lambda: MEMORY - _taken())
        patch.setattr(device, "settle", lambda: None)
        patch.setattr(device, "machine", lambda: device.Machine("NVIDIA H200", None, "2.13.0"))
        patch.setattr(inside, "_logged", set())
        yield Path(folder)
    forget_vllm()
    sys.modules.update(before)


def config(
    sizes=(8, 16, 32),
    mode="FULL_AND_PIECEWISE",
    k=3,
    ranks=1,
    rank=0,
    lengths=(3, 2),
    eager=False,
    schedule=None,
    max_num_seqs=16,
    ahead=True,
    broken=(),
    workspace=0,
    experts=(0, 0),
    warm_up=False,
    adaptive=None,
):
    """What of vLLM's configuration is read."""
    module = importlib.import_module(seams.MANAGERS)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=256, async_scheduling=ahead),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=list(sizes),
            max_cudagraph_capture_size=max(sizes, default=0),
            cudagraph_mode=module.CUDAGraphMode[mode],
            mode=0,
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=ranks,
            data_parallel_rank=rank,
            data_parallel_index=INDEX or rank,
            rank=0,
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            model="some/model",
            max_model_len=4096,
            dtype="bfloat16",
            enforce_eager=eager,
            get_num_experts=lambda: experts[0],
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16, gpu_memory_utilization=0.9),
        speculative_config=SimpleNamespace(
            method="eagle3",
            num_speculative_tokens=k,
            num_speculative_tokens_per_batch_size=schedule,
            rejection_sample_method="standard",
            draft_model_config=SimpleNamespace(get_num_experts=lambda: experts[1]),
        )
        if k
        else None,
        lora_config=None,
        kernel_config=SimpleNamespace(enable_jit_warmup=warm_up),
        num_speculative_tokens=k,
        chain_lengths=lengths,
        log=[],
        broken=broken,
        workspace=workspace,
        adaptive=adaptive,
    )


def started(fused=False, plan=lambda: None, decisions=None, worker="Worker", **changes):
    """A model runner of the stand-in, observed, as far as it serves."""
    observe.attach(importlib.import_module(seams.MANAGERS), plan, decisions)
    made = getattr(importlib.import_module(WORKER), worker)(config(**changes), fused)
    runner = made.model_runner
    runner.initialize_kv_cache()
    if not runner.vllm_config.model_config.enforce_eager:
        runner.capture_model(profile_only=True)
        runner.initialize_kv_cache()
    assert made.compile_or_warm_up_model() == "seconds"
    return runner


def step(num_reqs, query_len, prompts=0, k=3, sampled=None):
    """What vLLM's scheduler gives for a step: decodes of ``query_len``, and ``prompts`` of 20 tokens."""
    names = [f"r{index}" for index in range(num_reqs + prompts)]
    tokens = [query_len] * num_reqs + [20] * prompts
    accepted = sampled or [1] * (num_reqs + prompts)
    return SimpleNamespace(
        num_scheduled_tokens=dict(zip(names, tokens, strict=True)),
        total_num_scheduled_tokens=sum(tokens),
        scheduled_spec_decode_tokens={name: [-1] * (query_len - 1) for name in names[:num_reqs] if query_len > 1},
        scheduled_new_reqs=names[num_reqs:],
        uniform=None if prompts else query_len,
        drafts=k,
        sampled=[[0] * count for count in accepted],
    )


def run(runner, output):
    """One step, as vLLM's worker runs it."""
    runner.execute_model(output)
    return runner.sample_tokens(None).get_output()


def observed(folder, rank=0):
    """The only observation in a folder, written after ``shutdown``."""
    (path,) = folder.glob("*.yaml")
    assert path.name == f"vllm.rank{rank}.{os.getpid()}.yaml"
    return codec.load_observation(path)


def summary(role):
    """Steps by requests, query length, and mode and tokens of the graph."""
    found: Counter[tuple[object, ...]] = Counter()
    for batch in role.batches:
        entry = None if batch.graph is None else role.graphs[batch.graph].entry
        graph = ("NONE", None) if entry is None else (entry.mode.value, entry.num_tokens)
        found[batch.num_reqs, batch.query_len, *graph] += batch.steps
    return found


def counted(runner, role):
    """The same from the stand-in's own log."""
    found: Counter[tuple[object, ...]] = Counter()
    for output, answers in runner.answers:
        if role in answers:
            desc = answers[role]
            graph = (desc.cg_mode.name, desc.num_tokens) if desc.cg_mode else ("NONE", None)
            width = 1 if role == "draft_decode" else output.uniform
            found[len(output.num_scheduled_tokens), width, *graph] += 1
    return found


MODES = ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "NONE")
STEPS = st.lists(
    st.tuples(st.integers(1, 14), st.sampled_from((1, 2, 4)), st.integers(0, 2), st.integers(1, 3)),
    min_size=1,
    max_size=30,
)
