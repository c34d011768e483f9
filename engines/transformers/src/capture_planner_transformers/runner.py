"""The model runner of transformers, with the padding and the graphs of a plan; imports transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import CudaGraphBuffer

from capture_planner.errors import CaptureError
from capture_planner.modes import Reason
from capture_planner_transformers.observation import Ledger
from capture_planner_transformers.tables import EngineStep, GraphAnswer, GraphTable, Key


def device_ios(inputs_and_outputs: Any) -> tuple[Any, ...]:
    """Return what holds static inputs and graphs: one, or two where batches are prepared asynchronously."""
    if isinstance(inputs_and_outputs, ContinuousBatchingAsyncIOs):
        return tuple(pair.device_io for pair in inputs_and_outputs.io_pairs)
    return (inputs_and_outputs,)


def cache_tokens(cache: Any) -> int:
    """Return how many tokens the KV cache can read in a step; transformers renamed this between 5.17 and 5.23."""
    return int(cache.max_tokens_read if hasattr(cache, "max_tokens_read") else cache.num_pages)


class PlannedBuffer(CudaGraphBuffer):
    """The graphs of one set of static inputs; closed after warm-up.

    transformers' key ends with the longest sequence of the batch, a host value that flash attention sizes its workspace
    by. Each graph here is captured with the longest that its other sizes allow, so that it serves them all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    @property
    def keys(self) -> frozenset[Key]:
        """The keys of the captured graphs."""
        return frozenset(self._storage)

    def get_graph(self, key: Key) -> Any:
        return super().get_graph(key[:2])

    def set_graph(self, key: Key, graph: Any) -> None:
        if self.closed:
            raise CaptureError(f"a graph for {key} would be captured while serving; the plan's graphs are complete")
        super().set_graph(key[:2], graph)


class PlannedRunner(ModelRunner):
    """Pads each step to an entry of the plan and replays its graph, or runs it eager, unpadded, with a reason."""

    def __init__(self, runner: ModelRunner, table: GraphTable, ledger: Ledger) -> None:
        super().__init__(
            logit_processor=runner.logit_processor,
            cb_config=runner.cb_config,
            inputs_and_outputs=runner.inputs_and_outputs,
            cache=runner.cache,
            do_sample=runner.do_sample,
            return_logprobs=runner.return_logprobs,
        )
        self.table = table
        self.ledger = ledger
        self.captured: frozenset[Key] = frozenset()
        self.pools = tuple(PlannedBuffer() for _ in device_ios(self.inputs_and_outputs))
        for io, pool in zip(device_ios(self.inputs_and_outputs), self.pools, strict=True):
            # Each set of static inputs needs graphs of its own: a replay reads the inputs that it was captured with.
            io.graphs = pool
        self._requests: Sequence[Any] = ()
        self._warming: tuple[int, int] | None = None
        self._warm = False

    def scheduling(self, schedule: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
        """Return ``Scheduler.schedule_batch`` such that the requests of the next step are known when it is padded."""

        def schedule_batch(token_budget: int, cache_budget: int) -> Any:
            scheduled = schedule(token_budget, cache_budget)
            self._requests = scheduled[0] or ()
            return scheduled

        return schedule_batch

    def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        """Return the sizes of the plan's entry; of a step without one, the real sizes."""
        # A warm-up step has the sizes of its graph, and is no step of a request.
        if self._warming is not None:
            return self._warming
        states = [request.state for request in self._requests]
        step = EngineStep(
            num_reqs=len(states),
            num_tokens=num_q_tokens,
            reads=max_kv_read,
            past_prompt=all(state.position_offset >= len(state.initial_tokens) for state in states),
            block_table=use_decode_fast_path,
        )
        answer = self._answer(step)
        self.ledger.count(step, answer)
        # transformers reads this before it prepares inputs and again before the forward pass of the same step.
        self.pad_inputs = answer.key is not None
        if answer.key is None:
            return num_q_tokens, max_kv_read
        return answer.key if len(answer.key) == 2 else (answer.key[0], 0)

    def _answer(self, step: EngineStep) -> GraphAnswer:
        answer = self.table.answer(step)
        if answer.key is None or answer.key in self.captured:
            return answer
        # Planned and not captured: with graphs on, its capture failed, mostly for lack of memory.
        graphs = self.use_cuda_graph_decode if step.block_table else self.use_cuda_graph_varlen
        return GraphAnswer(answer.entry, None, Reason.MEMORY if graphs else Reason.MODE)

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Callable[..., Any], bool]:
        # A graph runs where the step was padded to one, whatever transformers would choose.
        return super()._get_forward_fn(use_block_table)[0], self.pad_inputs

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        """Run the step after its inputs, which transformers writes on another stream without an order between the two.

        Only its asynchronous mode waits (5.17 to 5.23); a replay starts at once and could read a half-written mask.
        """
        stream = self.inputs_and_outputs.compute_stream
        if isinstance(stream, torch.cuda.Stream):
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        super().compute_batch(model, batch_data)

    @torch.no_grad()
    def warmup(self, model: Any) -> None:
        """Capture every graph of the plan, largest first, for each set of static inputs; only the first call does."""
        if self._warm:
            return
        self._warm = True
        for pool in self.pools:
            # A device without graphs warms up nothing, and all steps run eager.
            for key in self.table.keys if self.use_cuda_graph_varlen or self.use_cuda_graph_decode else ():
                self._capture_key(model, key)
            pool.closed = True
            if isinstance(self.inputs_and_outputs, ContinuousBatchingAsyncIOs):
                self.inputs_and_outputs.swap_io_pairs()
        if hasattr(self.cache, "reset"):  # since 5.23, as in its own warm-up: return all memory to the global pool
            self.cache.reset()
        # Steps alternate between the sets, so a graph counts where every set has it.
        self.captured = frozenset.intersection(*(pool.keys for pool in self.pools))
        self.ledger.begin(self.table, self.captured)

    def _capture_key(self, model: Any, key: Key) -> None:
        """Run and capture one graph; transformers logs a failure and goes on, and the steps of that key run eager."""
        tokens, reads = key if len(key) == 2 else (key[0], None)
        self._warming = (tokens, reads or 0)
        self.pad_inputs = True
        before, started = _reserved(), time.perf_counter()
        try:
            # One request that reads as much as the graph does is the longest sequence that the graph can meet.
            past = None if reads is None else max(0, min(reads, cache_tokens(self.cache) - tokens))
            self.run_one_warmup(model, tokens, past)
        finally:
            self._warming = None
        # Kernels of the capture may still run, and would end up in the next graph's time.
        _synchronize()
        self.ledger.captured(key, time.perf_counter() - started, _reserved() - before)


def _reserved() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
