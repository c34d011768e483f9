"""Requests that the scheduler serves to their end: each token must be greedy, whatever was drafted."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from capture_planner.conformance.closeness import is_likeliest
from capture_planner.conformance.finding import Check
from capture_planner.conformance.scene import VOCABULARY, Serve
from capture_planner.errors import RunError
from capture_planner.modes import GraphMode
from capture_planner.runtime.serving.workload import Request

if TYPE_CHECKING:
    from capture_planner.conformance.stage import Stage


def check_serving(stage: Stage, step: Serve) -> None:
    """Serve requests by the scheduler, each token of which must be greedy."""
    longest = stage.scene.shape.longest
    draw = np.random.default_rng((stage.scene.seed, len(step.requests)))
    asked: list[Request] = []
    for number, (prompt, output, arrival) in enumerate(step.requests):
        prompt = max(1, min(prompt, longest - 1))
        tokens = tuple(draw.integers(0, VOCABULARY, prompt).tolist())
        asked.append(
            Request(
                name=f"served {number}",
                arrival=arrival * 0.01,
                prompt=tokens,
                max_new_tokens=max(1, output),
            )
        )
    too_long = [request for request in asked if request.length > longest]
    fitting = [request for request in asked if request.length <= longest]
    for request in too_long:
        with contextlib.suppress(RunError):
            stage.runner.start((request,)).cut_off()
            stage.refuse(Check.TOKENS, f"a request of {request.length} tokens was taken", None, None, None)
    if fitting:
        noted, ran = len(stage.runner.session.forwards), Counter(stage.watch.ran)
        served = {done.name: done.tokens for done in stage.runner.serve(fitting)}
        _check_counted(stage, noted, ran)
        for request in fitting:
            _check_served(stage, request, served[request.name])
    stage.world.refresh()


def _check_counted(stage: Stage, noted: int, before: Counter[str]) -> None:
    """Hold what the session wrote down since ``noted`` to what ran since then, by role and by mode."""
    counted: Counter[str] = Counter()
    for forward in stage.runner.session.forwards[noted:]:
        mode = GraphMode.NONE if forward.entry is None else forward.entry.mode
        counted[f"{forward.role.value} {mode.value}"] += forward.repeats
    ran = stage.watch.ran - before
    for what in sorted({*ran, *counted}):
        if counted[what] != ran[what]:
            says = f"{what} ran {ran[what]} times, and {counted[what]} are written down"
            stage.refuse(Check.COUNTED, says, None, None, None)


def _check_served(stage: Stage, request: Request, tokens: tuple[int, ...]) -> None:
    if len(tokens) != request.max_new_tokens:
        stage.refuse(
            Check.TOKENS,
            f"{request.name} asked for {request.max_new_tokens} tokens and has {len(tokens)}",
            None,
            None,
            None,
        )
    ids = torch.tensor([*request.prompt, *tokens[:-1]], device=stage.tested.device)
    hidden = stage.target.tables.attended(ids, len(request.prompt) - 1).flatten(1)
    said = torch.tensor(tokens, device=stage.tested.device)
    for number in range(len(tokens)):
        if not is_likeliest(stage, said[number : number + 1], hidden[number : number + 1], stage.target.head):
            stage.refuse(
                Check.TOKENS,
                f"token {number + 1} of {request.name} (prompt of {len(request.prompt)}) is not what the "
                "model says",
                None,
                None,
                None,
            )
