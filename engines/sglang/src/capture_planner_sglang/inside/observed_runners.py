"""SGLang's runners as an observation has them: their graphs, and what they answer."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.observation import ObservedGraph

Shape = tuple[Role, int, int, int | None, bool, int]
"""Role, requests, tokens, query length, whether past the prompt, adapters: as ``Recorder.count`` takes them."""

_REPLAYS = 5
"""Timed replays of a graph, after one that warms up."""

Answer = tuple[int | None, Reason | None]
"""Index of a graph, or the reason for none."""


def lora_count(model_runner: Any, batch: Any) -> int:
    """Return the distinct adapters of a batch, one more for rows without where any row has one."""
    if model_runner.lora_manager is None or batch.lora_ids is None:
        return 0
    used = set(batch.lora_ids)
    return len(used) if used != {None} else 0


@attrs.frozen(kw_only=True, eq=False)
class CapturedRunner:
    """One of SGLang's runners after capture."""

    role: Role
    runner: Any
    prompts: bool
    """True for prompts, whose sizes are tokens; False for uniform decodes, whose sizes are requests."""
    costs: Mapping[Any, tuple[float, float]]
    """Seconds and MiB of each capture, by SGLang's key."""
    milliseconds: Mapping[Any, float] = attrs.field(factory=dict)
    """Median milliseconds of a replay by SGLang's key; empty if graphs were not timed."""

    @property
    def keys(self) -> list[Any]:
        """SGLang's keys of the graphs, in capture order."""
        return list(self.runner.backend._graphs)

    @property
    def mode(self) -> GraphMode:
        # FullCudaGraphBackend; the other classes of runner_backend capture in segments.
        full = type(self.runner.backend).__name__.startswith("Full")
        return GraphMode.FULL if full else GraphMode.PIECEWISE

    @property
    def width(self) -> int:
        """Tokens of a request in a decode."""
        return int(self.runner.captured_req_width)

    def timed(self, event: Callable[[], Any]) -> CapturedRunner:
        """Return the runner with the time of its full graphs, each replayed over the buffers of its capture.

        :param event: makes an event with ``record``, ``synchronize`` and ``elapsed_time``.
        """
        # Prefills, and attention between segments, need the metadata of a real batch.
        if self.mode is not GraphMode.FULL or self.prompts:
            return self
        milliseconds = {}
        # As the runner's own execute does around a replay.
        with self.runner.model_context(), self.runner.backend.replay_session():
            for key in self.keys:
                times = [self._replay(key, event(), event()) for _ in range(1 + _REPLAYS)]
                # The first replay warms up.
                milliseconds[key] = round(statistics.median(times[1:]), 5)
        return attrs.evolve(self, milliseconds=milliseconds)

    def _replay(self, key: Any, start: Any, stop: Any) -> float:
        start.record()
        self.runner.backend.replay(key, None)
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop))

    def graphs(self, max_loras: int, draft_steps: int | None) -> tuple[ObservedGraph, ...]:
        """Return the graphs with their costs; ``draft_steps`` is the length of a chain of draft decodes."""
        return tuple(
            ObservedGraph(
                entry=self._entry(key, max_loras, draft_steps),
                prompts_only=self.prompts,
                seconds=round(self.costs[key][0], 4) if key in self.costs else None,
                mib=round(self.costs[key][1], 3) if key in self.costs else None,
                milliseconds=self.milliseconds.get(key),
            )
            for key in self.keys
        )

    def _entry(self, key: Any, max_loras: int, draft_steps: int | None) -> Entry:
        # Drafters have no adapters.
        loras = 0 if self.role.is_drafter or key.variant_label == "nolora" else max_loras
        if self.prompts:
            # A full graph has so many requests baked in; of a breakable one attention runs outside.
            slots = self.runner._capture_req_slots if self.mode is GraphMode.FULL else None
            return Entry(mode=self.mode, num_tokens=key.size, num_reqs=slots, active_loras=loras)
        steps = draft_steps if self.role is Role.DRAFT_DECODE else None
        return Entry(
            mode=self.mode,
            num_tokens=key.size * self.width,
            num_reqs=key.size,
            query_len=self.width,
            active_loras=loras,
            draft_steps=steps,
        )

    def shape(self, batch: Any) -> Shape:
        """Return a forward batch of SGLang as the recorder counts it."""
        loras = lora_count(self.runner.model_runner, batch)
        if self.prompts:
            return self.role, batch.batch_size, len(batch.input_ids), None, False, loras
        return self.role, batch.batch_size, batch.batch_size * self.width, self.width, True, loras

    def replayed_key(self, shape: Shape) -> Any:
        """Return SGLang's key of the graph that it has just replayed."""
        runner = self.runner
        if self.prompts:
            # The runner keeps no key of a prefill, but it takes the next size.
            sizes = runner.capture_num_tokens
            return self._key(sizes[bisect_left(sizes, shape[2])])
        # Only the target has several graphs of a size, and only its runner keeps which it replayed.
        return runner._replay_graph_key if self.role is Role.TARGET else runner._make_graph_key(runner.bs)

    def _key(self, size: int) -> Any:
        return next((key for key in self.keys if key.size == size), None)

    def reason(self, shape: Shape) -> Reason:
        """Return why a batch has no graph although the runner has some."""
        over = shape[2] > self.runner.max_num_tokens if self.prompts else shape[1] > self.runner.max_bs
        return Reason.SIZES if over else Reason.UNCOVERED

    def answer(self, batch: Batch, table: Mapping[Any, int], prompt_mode: Any) -> Answer:
        """Ask the runner itself about a batch.

        :param table: the index of each graph by SGLang's key.
        :param prompt_mode: SGLang's ``ForwardMode`` of prompts.
        """
        if self.prompts:
            return self._prompt(batch, table, prompt_mode)
        # As can_run_graph does by spec_info: a batch of another width runs eager.
        if batch.uniform_query_len != self.width:
            return None, Reason.UNCOVERED
        return self._decode(batch.num_reqs, batch.active_loras, table)

    def _decode(self, num_reqs: int, loras: int, table: Mapping[Any, int]) -> Answer:
        runner, shape = self.runner, (self.role, num_reqs, num_reqs * self.width, self.width, True, loras)
        # What can_run_graph reads of a forward batch, and no more.
        batch = SimpleNamespace(
            replace_embeds=None,
            spec_info=SimpleNamespace(num_tokens_per_req=self.width),
            sampling_info=None,
            batch_size=num_reqs,
            seq_lens=SimpleNamespace(numel=lambda: num_reqs),
            input_ids=SimpleNamespace(numel=lambda: num_reqs * self.width),
            # As if all attention-DP ranks had the same batch.
            original_global_num_tokens_cpu=[num_reqs],
            can_run_decode_cuda_graph=True,
            lora_ids=["adapter" if loras else None] * num_reqs,
        )
        if not runner.can_run_graph(batch):
            return None, self.reason(shape)
        # Only the target has graphs with adapters and without.
        label = {"variant_label": runner._resolve_lora_variant(batch)} if self.role is Role.TARGET else {}
        key = runner._make_graph_key(runner._pad_to_bucket(num_reqs, runner.capture_bs), **label)
        return (table[key], None) if key in table else (None, Reason.SHADOWED)

    def _prompt(self, asked: Batch, table: Mapping[Any, int], mode: Any) -> Answer:
        runner, num_reqs, num_tokens = self.runner, asked.num_reqs, asked.num_tokens
        shape = (self.role, num_reqs, num_tokens, None, False, asked.active_loras)
        batch = SimpleNamespace(
            global_num_tokens_cpu=None,
            can_run_dp_prefill_cuda_graph=True,
            batch_size=num_reqs,
            input_ids=range(num_tokens),
            extend_num_tokens=num_tokens,
            input_embeds=None,
            replace_embeds=None,
            extend_prefix_lens_cpu=[0] * num_reqs,
            forward_mode=mode,
            global_forward_mode=mode,
            capture_hidden_mode=runner.capture_hidden_mode,
            return_logprob=False,
            seq_lens_cpu=[asked.query_len or -(-num_tokens // num_reqs)] * num_reqs,
            contains_mm_inputs=lambda: False,
        )
        if not runner.can_run_graph(batch):
            return None, self.reason(shape)
        key = self._key(runner._pad_to_bucket(num_tokens, runner.capture_num_tokens))
        return (table[key], None) if key in table else (None, Reason.SHADOWED)
