"""transformers' continuous batching with a clock around each step, for the comparison with a plan."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import attrs
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import capture_planner_transformers
from capture_planner.errors import RunError
from capture_planner.records.plan import Plan

STOCK, PLANNED, EAGER = "stock", "plan", "eager"


@attrs.frozen(kw_only=True)
class Request:
    """A request that arrives before a given step."""

    step: int
    prompt: tuple[int, ...]
    output: int


class Serving:
    """One manager of one contender, from its warm-up on, with a clock around each step."""

    def __init__(self, model: Any, contender: str, plan: Plan, reads: Sequence[int], pages: int | None) -> None:
        cuda = model.device.type == "cuda"
        greedy: Any = GenerationConfig
        options: dict[str, Any] = {
            "use_cuda_graph": cuda and contender != EAGER,
            # A load must not reuse the cached prompts of an earlier one.
            "allow_block_sharing": False,
            # It might download the attention that it switches to.
            "auto_switch_to_flash": False,
            "max_batch_tokens": plan.limits.max_num_tokens,
            "num_blocks": pages,
            # Room for the graphs of both.
            "max_memory_percent": 0.8,
        }
        if pages is not None:
            options |= {"block_size": 16, "page_size": 16}
        known = inspect.signature(ContinuousBatchingConfig).parameters
        self._manager = model.init_continuous_batching(
            generation_config=greedy(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                max_requests_per_batch=plan.limits.max_num_reqs,
                **{name: value for name, value in options.items() if name in known},
            ),
        )
        if contender == PLANNED:
            capture_planner_transformers.apply(self._manager, plan, kv_sizes=reads)
        self.captures = 0
        started = perf_counter()
        self._manager.warmup()
        settle()
        self.warmup_seconds = perf_counter() - started
        runner = self._manager.batch_processor.model_runner
        self.graphs = sum(len(buffer._storage) for buffer in _buffers(self._manager.batch_processor.inputs_and_outputs))
        capture = runner._capture_graph

        def counted(*arguments: Any) -> None:
            self.captures += 1
            capture(*arguments)

        runner._capture_graph = counted
        if contender == EAGER:
            runner.compute_batch = _ordered(runner)
        self._waiting: list[Request] = []
        self._first = 0
        self._started = 0.0
        self.steps: list[float] = []
        body = self._manager._generation_loop_body

        def timed(*arguments: Any, **named: Any) -> bool:
            self._submit()
            before, begin = self._manager.current_batch, perf_counter()
            more: bool = body(*arguments, **named)
            if self._manager.current_batch > before:
                self.steps.append(perf_counter() - begin)
            return more

        self._manager._generation_loop_body = timed
        self._manager.start()

    def _submit(self) -> None:
        """Add the requests whose step has come; while nothing runs, the next one is due."""
        if self._waiting and not self._started:
            self._started = perf_counter()
        now = len(self.steps) - self._first
        idle = self._manager.input_queue.empty() and not self._manager.batch_processor.has_pending_requests()
        while self._waiting and (idle or self._waiting[0].step <= now):
            request, idle = self._waiting.pop(0), False
            self._manager.add_request(list(request.prompt), max_new_tokens=request.output)

    def serve(self, load: Sequence[Request]) -> dict[str, Any]:
        """Serve one load and return its figures; ``tokens`` are in the order of the requests."""
        captures, self._first, base = self.captures, len(self.steps), self._manager._request_counter
        self._started = 0.0
        self._waiting = sorted(load, key=lambda request: request.step)
        order = sorted(range(len(load)), key=lambda index: load[index].step)
        done: dict[str, list[int]] = {}
        while len(done) < len(load):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RunError("transformers' generation thread ended; its log has the reason")
                continue
            if result.error is not None:
                raise RunError(f"transformers failed: {result.error}")
            if result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
        seconds = perf_counter() - self._started
        steps = sorted(1000 * step for step in self.steps[self._first :])
        tokens = {index: done[f"req_{base + place}"] for place, index in enumerate(order)}
        return {
            "tokens_per_second": sum(map(len, done.values())) / seconds,
            "step_p50_ms": _quantile(steps, 0.50),
            "step_p99_ms": _quantile(steps, 0.99),
            "step_max_ms": steps[-1],
            "steps": len(steps),
            "captures": self.captures - captures,
            "tokens": [tokens[index] for index in range(len(load))],
        }

    def eager(self) -> dict[str, int]:
        """Return how many steps of a plan ran eager, by reason."""
        ledger = getattr(self._manager.batch_processor.model_runner, "ledger", None)
        found: dict[str, int] = {}
        for (key, reason), count in () if ledger is None else ledger.steps.items():
            if key is None:
                found[str(reason)] = found.get(str(reason), 0) + count
        return found

    def close(self) -> None:
        """Stop the manager and free its memory."""
        self._manager.stop(block=True)
        self._manager.destroy()
        del self._manager
        settle()


def _buffers(inputs_and_outputs: Any) -> list[Any]:
    pairs = getattr(inputs_and_outputs, "io_pairs", None)
    return [inputs_and_outputs.graphs] if pairs is None else [pair.device_io.graphs for pair in pairs]


def _ordered(runner: Any) -> Any:
    """Return ``compute_batch`` such that a step waits for its inputs, so that the reference is one.

    transformers' synchronous mode writes inputs on another stream than it computes on, without an order between them.
    """
    compute = runner.compute_batch

    def compute_batch(*arguments: Any) -> None:
        stream = runner.inputs_and_outputs.compute_stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        compute(*arguments)

    return compute_batch


def settle() -> None:
    """Free what nothing holds, on the device too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
