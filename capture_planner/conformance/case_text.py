"""Describe a case of the conformance suite: its set-up, then each step."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.conformance.capture_attack import CaptureAttack
from capture_planner.conformance.features import NAMES, SCORING
from capture_planner.conformance.scene import Arrive, Case, Depart, Move, Reload, RunBatch, Scene, Serve, Step
from capture_planner.records.text import counted


def describe_case(case: Case) -> tuple[str, ...]:
    """Return a line for the set-up and one for each step. Requests are numbered by arrival, from 0."""
    return (_scene(case.scene), *_steps(case.steps))


def _scene(scene: Scene) -> str:
    parts = [
        f"set up {scene.shape}",
        counted(scene.layers, "layer"),
        *([f"windows of {scene.window} instead"] if scene.window else []),
        scene.mode.value,
        f"up to {counted(scene.num_reqs, 'request')} and {counted(scene.num_tokens, 'token')}",
    ]
    if scene.size_tokens:
        parts.append(f"captured at {_list(scene.size_tokens)} tokens and {_list(scene.size_reqs)} requests")
    if scene.drafts:
        drafting = f"{scene.drafter} with {counted(scene.drafts, 'draft')}"
        for first, last, k in scene.schedule:
            drafting += f", {k} at {first} to {last} requests"
        parts.append(drafting)
        if scene.speculative is not None and scene.speculative.is_chain:
            parts.append("chains as one graph" if scene.fused else "chains in single steps")
        if scene.agreeing:
            parts.append("every other draft accepted")
        if scene.varying:
            parts.append("decodes of varying lengths")
    if scene.per_role:
        parts.append("a pool per role")
    if scene.ahead:
        parts.append("steps launched ahead")
    if scene.full_cache:
        parts.append("no page to spare")
    parts += [*_features(scene), *_attack(scene.capture)]
    return f"{'; '.join(parts)}; seed {scene.seed}"


def _attack(attack: CaptureAttack) -> Iterator[str]:
    if attack.order:
        yield f"captured in another order ({attack.order})"
    if attack.alone:
        yield f"memory for graph {attack.alone} of each role alone"
    if attack.breaks:
        after = "everything eager after it" if attack.stays_eager else "captured again after it"
        yield f"an error at attention call {attack.breaks} of the capture, {after}"


def _features(scene: Scene) -> Iterator[str]:
    for name in SCORING:
        if getattr(scene, name):
            yield NAMES[name]
    if scene.loras:
        yield f"up to {counted(scene.loras, 'active adapter')}"
    if scene.ranks > 1:
        yield f"sequence parallelism of {scene.ranks}"
    if scene.beyond:
        yield f"the largest graphs {scene.beyond} beyond the limits"
    if scene.compiled:
        yield "models compiled"
    if scene.lazy:
        yield "most graphs captured on first use"


def _steps(steps: tuple[Step, ...]) -> Iterator[str]:
    arrived = 0
    for step in steps:
        match step:
            case Arrive():
                computed = f", {step.computed} computed before" if step.computed else ""
                shares = "" if step.shares is None else f", sharing full pages of request {step.shares}"
                yield f"request {arrived} arrives: a prompt of {counted(step.prompt, 'token')}{computed}{shares}"
                arrived += 1
            case Depart():
                yield f"request {step.request} leaves and frees its pages"
            case Move():
                yield f"the pages of request {step.request} are exchanged for others"
            case Reload():
                yield f"weights are reloaded in place, from seed {step.seed}"
            case RunBatch():
                loras = f" with {counted(step.loras, 'active adapter')}" if step.loras else ""
                yield f"a step of {counted(len(step.rows), 'request')}{loras}: {'; '.join(map(_row, step.rows))}"
            case Serve():
                served = "; ".join(map(_served, step.requests))
                ends = f"; tokens divisible by {step.stop} end an output" if step.stop else ""
                yield f"{counted(len(step.requests), 'request')} served to the end, next to live ones: {served}{ends}"


def _row(row: tuple[int, int, int]) -> str:
    request, count, accepted = row
    drafts = f", {counted(accepted, 'draft')} accepted" if accepted else ""
    return f"request {request} with {counted(count, 'token')}{drafts}"


def _served(request: tuple[int, int, int]) -> str:
    prompt, output, arrival = request
    later = f", {counted(arrival, 'step')} later" if arrival else ""
    return f"a prompt of {prompt} and {counted(output, 'new token')}{later}"


def _list(numbers: tuple[int, ...]) -> str:
    return " and ".join(map(str, numbers))
