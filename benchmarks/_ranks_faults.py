"""Ranks of ``ranks_gpu.py`` that fail: what is planted in one of them, and what all then say."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import torch
from _ranks_rig import Rank, compilation_facts, load, plan_of, requests_of, runner_of, small

from capture_planner.modes import GraphMode
from capture_planner.records.model import DataType
from capture_planner.runtime.ranks.symmetric import collectives_of

STEPS = 40
"""Steps until a planted fault."""

SEGMENT = 2 << 20
"""Bytes that torch's allocator asks the driver for, to serve tensors of at most half as many."""

MORE_THAN_THERE_IS = 1 << 50
"""Bytes that no device has."""


def fault(rank: Rank) -> None:
    """Serve, and let the last rank be killed, run out of memory, be slow, or be unable to compile the model."""
    kind, place = rank.arguments["kind"], rank.peers.place
    is_last = place.rank == place.size - 1
    model = small(rank, DataType.FLOAT32)
    plan = plan_of(rank, model, "reference", 8, (1, 4, 8), 0, GraphMode.FULL_DECODE_ONLY)
    among = collectives_of(rank.peers, rank.device)
    target = load(rank, model, among)
    found: dict[str, Any] = {"kind": kind, "started": time.time()}
    rank.write(found)
    if kind == "not compiled" and is_last:
        next(iter(target.linears().values())).register_forward_hook(_other_path)
    with runner_of(rank, plan, target, compile=kind == "not compiled") as runner:
        # What a process allocates once is there before memory is limited.
        runner.serve(requests_of(8, model.vocab_size or 0, 4))
        held = _leave_no_memory(rank) if kind == "out of memory" and is_last else []
        runner.capture(memory=1 if kind == "memory limit" and is_last else None)
        held.clear()
        if kind == "out of memory" and is_last:
            torch.cuda.set_per_process_memory_fraction(1.0, rank.device)
        waived = [done.waiver.message for done in runner.session.captured if done.waiver is not None]
        serving = runner.start(requests_of(16, model.vocab_size or 0, 40))
        serving.scheduler.arrive(1e9, time.perf_counter())
        count = 0
        while not serving.done:
            count += 1
            if count == STEPS:
                found["fault"] = time.time()
                rank.write(found)
                if is_last and kind == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if is_last and kind == "out of memory in a step":
                    torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8, device=rank.device)
                if is_last and kind == "slow":
                    time.sleep(4.0)
            serving.step()
        served = {done.name: list(done.tokens) for done in serving.served}
        found["compilation"] = compilation_facts(runner.compilation)
    del runner, serving
    among.release()
    found |= {"done": time.time(), "requests": len(served), "waived": waived[:2], "graphs waived": len(waived)}
    found["equal on all ranks"] = len({json.dumps(each) for each in rank.peers.exchange("served", served)}) == 1
    rank.write(found)


def _leave_no_memory(rank: Rank) -> list[torch.Tensor]:
    """Let this rank have the memory that its allocator holds: a pool of graphs, which needs a new segment, has none.

    Return blocks that keep a quarter of some segments, in whose rest a warm-up fits.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = [torch.empty(SEGMENT // 4, dtype=torch.uint8, device=rank.device) for _ in range(64)][::4]
    whole = torch.cuda.get_device_properties(rank.device).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / whole, rank.device)
    return held


def _other_path(module: torch.nn.Module, inputs: Any, out: torch.Tensor) -> torch.Tensor:
    """Return what a layer returns, in another way for few rows: no trace holds for any number of them."""
    return out if out.shape[-2] > 4 else out * 1
