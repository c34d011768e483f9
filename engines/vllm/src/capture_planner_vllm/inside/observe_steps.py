"""What observing wraps around vLLM's steps: the hot path. Each wrapper is written out, without a layer in between."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from capture_planner_vllm.inside.observe_ranks import ObservedGroup
from capture_planner_vllm.inside.watch import (
    DISPATCHED,
    IDLE,
    OUTPUT,
    SAMPLED,
    SCHEDULED,
    SPECIALIZED,
    VECTOR,
    StepWatch,
)


class StepHooks:
    """Makes wrappers that log each step to the active watch, if there is one; no error of ours reaches vLLM."""

    _active: StepWatch | None = None
    _runners = 0
    """Model runners that have been recorded."""
    _reads_joins = True

    def _failed(self, doing: str, error: Exception) -> None:
        """Stop observing after an error of ours."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Write the last observation."""
        raise NotImplementedError

    def _begin_eager(self, runner: Any, kwargs: Mapping[str, Any]) -> None:
        """Begin at the first real step where vLLM captures nothing."""
        raise NotImplementedError

    def _dummy_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _dummy_run(runner: Any, *args: Any, **kwargs: Any) -> Any:
            active = self._active
            if active is None or active.dummies:
                return original(runner, *args, **kwargs)
            self._active = None
            try:
                return original(runner, *args, **kwargs)
            finally:
                # Logged also after an error: the time up to here belongs to no step.
                self._active = active
                active.log((IDLE,))

        return _dummy_run

    def _rank_group(self, original: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(original)
        def get_dp_group() -> Any:
            group, watch = original(), self._active
            return group if watch is None else ObservedGroup(group, self._vector)

        return get_dp_group

    def _vector(self, vector: Any) -> None:
        watch = self._active
        if watch is not None:
            try:
                # A copy, because vLLM writes the padded tokens into the same tensor once the ranks agree.
                watch.log((VECTOR, vector.clone()))
            except Exception as error:
                self._failed("counting what ranks bring", error)

    def _execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            # vLLM has captured nothing, as it was told to, and the end of its start was not seen.
            if self._active is None and self._runners == 0:
                self._begin_eager(runner, kwargs)
            watch = self._active
            if watch is None:
                return original(runner, scheduler_output, *args, **kwargs)
            try:
                now, timing = perf_counter(), next(watch.turns)
                # A step that was timed and did not end has left its time open.
                if timing or watch.timing:
                    watch.begin(timing)
                watch.log(
                    (
                        SCHEDULED,
                        scheduler_output.scheduled_spec_decode_tokens if watch.drafts else None,
                        now,
                        # Without the fields every step counts as one that waited for requests: no interval is kept.
                        not self._reads_joins
                        or len(scheduler_output.scheduled_new_reqs) == len(scheduler_output.num_scheduled_tokens),
                    )
                )
            except Exception as error:
                self._failed("beginning a step", error)
            result = original(runner, scheduler_output, *args, **kwargs)
            if watch.timing:
                try:
                    watch.forward_end()
                except Exception as error:
                    self._failed("timing a forward", error)
            return result

        return execute_model

    def _dispatch_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dispatch_cg_and_sync_dp(
            cudagraph_manager: Any, num_reqs: int, num_tokens: int, uniform_token_count: int | None, *a: Any, **k: Any
        ) -> Any:
            answer = original(cudagraph_manager, num_reqs, num_tokens, uniform_token_count, *a, **k)
            watch = self._active
            if watch is not None:
                try:
                    event = (DISPATCHED, cudagraph_manager, num_reqs, num_tokens, uniform_token_count, k, answer[0])
                    watch.log(event)
                    if watch.timing:
                        watch.timed(event)
                except Exception as error:
                    self._failed("counting a dispatch", error)
            return answer

        return dispatch_cg_and_sync_dp

    def _specialize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def specialize_spec_tokens(manager: Any, desc: Any, num_speculative_tokens: int) -> Any:
            answer = original(manager, desc, num_speculative_tokens)
            watch = self._active
            if watch is not None:
                try:
                    watch.log(event := (SPECIALIZED, answer, num_speculative_tokens))
                    if watch.timing:
                        watch.timed(event)
                except Exception as error:
                    self._failed("counting a draft decode", error)
            return answer

        return specialize_spec_tokens

    def _forward_start(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def forward_start(collector: Any) -> None:
            original(collector)
            watch = self._active
            if watch is not None and watch.timing:
                try:
                    watch.forward()
                except Exception as error:
                    self._failed("timing a forward", error)

        return forward_start

    def _sample_tokens(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(runner, *args, **kwargs)
            watch = self._active
            if watch is not None:
                try:
                    # The id alone: the output holds tensors of the device.
                    watch.log((SAMPLED, id(output), perf_counter()))
                    if watch.timing:
                        watch.end()
                except Exception as error:
                    self._failed("ending a step", error)
            return output

        return sample_tokens

    def _get_output(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_output(output: Any) -> Any:
            result = original(output)
            watch = self._active
            if watch is not None and watch.drafts:
                try:
                    # The scheduler shortens these lists; only their lengths can wait.
                    watch.log((OUTPUT, id(output), result.req_ids, watch.lengths(map(len, result.sampled_token_ids))))
                except Exception as error:
                    self._failed("counting drafts", error)
            return result

        return get_output

    def _shutdown(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def shutdown(runner: Any) -> None:
            # First ours: the events that are left to read are gone with the device.
            self._finish()
            original(runner)

        return shutdown
