"""Requests that the scheduler serves to their end: each token must be greedy, whatever was drafted."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import torch

from capture_planner.conformance.failure import Check
from capture_planner.conformance.forward_checks import is_likeliest
from capture_planner.conformance.scene import VOCABULARY, Serve
from capture_planner.conformance.stage import Stage
from capture_planner.errors import RunError
from capture_planner.modes import GraphMode
from capture_planner.runtime.serving.workload import Request


def check_serving(stage: Stage, step: Serve) -> None:
    """Serve requests with the scheduler and check their tokens; ones that are too long must be refused."""
    longest = stage.scene.shape.longest
    requests = _requests(step, longest, stage.scene.seed)
    for request in requests:
        if request.length > longest:
            with contextlib.suppress(RunError):
                stage.runner.start((request,)).cut_off()
                raise Check.TOKENS.violation(f"a request of {request.length} tokens was accepted")
    fitting = [request for request in requests if request.length <= longest]
    if fitting:
        recorded, ran = len(stage.runner.session.forwards), Counter(stage.watch.ran)
        tokens = {served.name: served.tokens for served in stage.runner.serve(fitting)}
        _check_counted(stage, recorded, ran)
        for request in fitting:
            _check_tokens(stage, request, tokens[request.name])
    stage.world.refresh()


def _requests(step: Serve, longest: int, seed: int) -> list[Request]:
    draw = np.random.default_rng((seed, len(step.requests)))
    return [
        Request(
            name=f"served {number}",
            arrival=arrival * 0.01,
            prompt=tuple(draw.integers(0, VOCABULARY, max(1, min(prompt, longest - 1))).tolist()),
            max_new_tokens=max(1, output),
        )
        for number, (prompt, output, arrival) in enumerate(step.requests)
    ]


def _check_counted(stage: Stage, recorded: int, before: Counter[str]) -> None:
    """Compare the forwards of the session since ``recorded`` with those that ran, by role and mode."""
    counts: Counter[str] = Counter()
    for forward in stage.runner.session.forwards[recorded:]:
        mode = GraphMode.NONE if forward.entry is None else forward.entry.mode
        counts[f"{forward.role.value} {mode.value}"] += forward.repeats
    ran = stage.watch.ran - before
    for kind in sorted({*ran, *counts}):
        if counts[kind] != ran[kind]:
            message = f"{kind} ran {ran[kind]} times, and the session has {counts[kind]}"
            raise Check.COUNTED.violation(message)


def _check_tokens(stage: Stage, request: Request, tokens: tuple[int, ...]) -> None:
    if len(tokens) != request.max_new_tokens:
        message = f"{request.name} asked for {request.max_new_tokens} tokens and has {len(tokens)}"
        raise Check.TOKENS.violation(message)
    ids = torch.tensor([*request.prompt, *tokens[:-1]], device=stage.subject.device)
    hidden = stage.target.tables.attended(ids, len(request.prompt) - 1).flatten(1)
    served = torch.tensor(tokens, device=stage.subject.device)
    for number in range(len(tokens)):
        one = slice(number, number + 1)
        if not is_likeliest(served[one], hidden[one], stage.target.head, stage.tolerance):
            message = (
                f"token {number + 1} of {request.name} (prompt of {len(request.prompt)}) is not the model's "
                "greedy choice"
            )
            raise Check.TOKENS.violation(message)
