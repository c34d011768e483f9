"""SGLang under random plans: the real registry, the real rules and runners, and our hooks, without a GPU.

    PYTHONPATH=tests python tests/engines/oracle/run_sglang_apply.py --wheel WHEEL --count 2000

For each plan, ``launch`` gives SGLang's command. SGLang's own parser and rules resolve it, its own code makes the
runners of all roles, and its own functions answer each admissible decode. Compared with the plan: that the two agree,
the sizes that each role captures, and the graph of every decode. The functions that are hooked have the parameters
and attributes that the plugin checks. Runners are made without their constructors' buffers: a constructor asks for
the sizes and writes shapes down.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from capture_planner import Dispatcher, codec
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.inside import resolve
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner_sglang.emulation.export import DecodeSizes, decode_sizes_of
from capture_planner_sglang.emulation.launch import launch
from capture_planner_sglang.inside import seam
from capture_planner_sglang.inside.agreement import ResolvedFacts, disagreements
from capture_planner_sglang.inside.hooks import PlanHooks
from capture_planner_sglang.inside.observe import SglangObserver
from capture_planner_sglang.inside.observed_facts import observation_of
from engines.generators import sglang as drawing
from engines.generators import sglang_apply
from engines.oracle.comparison import finish, options, oracle, say, sources

_launching = oracle("sglang_launch")


class Current:
    """The hooks of the plan that is compared: SGLang's registry patches a function once for a process."""

    hooks: PlanHooks

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: getattr(self.hooks, name)(*args, **kwargs)

    def register(self, registry: Any, kinds: Any) -> None:
        PlanHooks.register(self, registry, kinds)  # type: ignore[arg-type]


class AppliedLaunch(_launching.Launch):  # type: ignore[misc, name-defined]
    """A launch whose runners are made by their classes, as SGLang's own code makes them."""

    def _capture(self) -> dict[tuple[Role, str], Any]:
        MAKERS[Role.TARGET] = self.fill_decode_runner
        for role, phase, module in (
            (Role.DRAFT_PREFILL, "draft_extend", self.m.extend),
            (Role.DRAFT_DECODE, "draft_decode", self.m.draft),
        ):
            MAKERS[role] = functools.partial(self.fill_draft_runner, module=module, phase=phase)
        return super()._capture()  # type: ignore[no-any-return]

    def _name_draft_classes(self) -> None:
        """The worker makes its own classes."""

    def _decode_runner(self, model_runner: Any) -> Any:
        return self.m.decode.DecodeCudaGraphRunner(model_runner)


MAKERS: dict[Role, Any] = {}
"""What a runner's constructor does, by role."""


def install(own: Any) -> Current:
    """Check the seams, and let SGLang's registry apply our hooks to it."""
    strange = [*seam.unknown((*seam.APPLY, *seam.OBSERVE))]
    if strange:
        raise SystemExit("\n".join(strange))
    for role, path in seam.RUNNERS.items():
        resolve(path).__init__ = lambda runner, owner, role=role, **_: MAKERS[role](runner, owner)
    scheduler = resolve(seam.SCHEDULER.rpartition(".")[0])
    scheduler.__init__ = lambda self, server_args, port_args: None
    registry = resolve("sglang.srt.plugins.hook_registry")
    current = Current()
    current.register(registry.HookRegistry, registry.HookType)
    registry.HookRegistry.apply_hooks()
    missing = set(registry.HookRegistry._hooks) - registry.HookRegistry._patched
    if missing:
        raise SystemExit(f"SGLang's registry did not apply {', '.join(sorted(missing))}")
    return current


def differences(plan: Plan, planned: DecodeSizes, launched: AppliedLaunch, seen: Counter[str]) -> Iterator[str]:
    """Yield where SGLang's runners differ from the plan."""
    dispatcher = Dispatcher(plan)
    observer = _observer(launched)
    mode = launched.m.batches.ForwardMode.EXTEND
    for role, sizes in planned.by_role.items():
        runner = launched.runners.get((role, "decode"))
        if sizes is None:
            seen["roles with SGLang's sizes"] += 1
            continue
        captured = () if runner is None else tuple(runner.capture_bs)
        keys = [] if runner is None else [key.size for key in runner.backend._graphs]
        if captured != sizes or sorted(set(keys)) != list(sizes) or keys != sorted(keys, reverse=True):
            yield f"{role.value}: the plan has {sizes}, SGLang captures {keys} of {captured}"
        width = 1 if role is Role.DRAFT_DECODE else planned.width
        cases = (0,) if plan.lora is None or role.is_drafter else (0, 1, 2, 9)
        for num_reqs in range(1, min(plan.limits.max_num_reqs, plan.limits.max_num_tokens // width) + 1):
            for loras in cases:
                batch = Batch.decode(role, num_reqs, width, loras)
                answer = dispatcher.dispatch(batch)
                ours = answer.entry.num_reqs if answer.entry and answer.mode is GraphMode.FULL else None
                row = launched._answer_decode(batch, width)
                theirs = None if row is None else row[2]
                seen["decodes"] += 1
                if ours != theirs:
                    yield f"{batch}: the plan's graph has {ours} requests, SGLang's {theirs}"
                if observed(observer, batch, mode) != (None if row is None else row[1]):
                    yield f"{batch}: SGLang answers {row}, and is observed otherwise"
        for tokens in range(1, plan.limits.max_num_tokens + 1, 97):
            batch = Batch.mixed(role, min(tokens, 1 + tokens % 50), tokens)
            row = None if role is Role.DRAFT_DECODE else launched._answer_prefill(batch)
            seen["prompts"] += 1
            if observed(observer, batch, mode) != (None if row is None else row[1]):
                yield f"{batch}: SGLang answers {row}, and is observed otherwise"


def observed(observer: SglangObserver, batch: Batch, mode: Any) -> int | None:
    """Return the tokens of the graph that our question to a runner names."""
    each = observer.runners.get((batch.role, batch.uniform_query_len is None))
    if each is None:
        return None
    table = observer.tables()[each]
    graph, _ = each.answer(batch, table, mode)
    return None if graph is None else each.graphs(9, None)[graph - min(table.values())].entry.num_tokens


def misobserved(launched: AppliedLaunch, plan: Plan, planned: DecodeSizes) -> Iterator[str]:
    """Yield where an observation, written and read again, answers decodes otherwise than the plan."""
    model = launched._model_runner(draft=False)
    model.max_total_num_tokens, model.page_size = 4096, 1
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=model))
    observer = _observer(launched)
    written = observation_of(observer, scheduler, plan=plan, decisions=planned.decisions, notes=())
    observation = codec.loads(codec.dumps(written), Observation)
    if observation != written or observation.notes:
        yield f"the observation is not what was written, or lacks something: {observation.notes}"
    dispatcher = Dispatcher(plan)
    for manager in emulation_of(observation).managers:
        if planned.by_role.get(manager.role) is None:
            continue
        width = 1 if manager.role is Role.DRAFT_DECODE else planned.width
        for num_reqs in range(1, plan.limits.max_num_reqs + 1):
            batch = Batch.decode(manager.role, num_reqs, width)
            ours, theirs = dispatcher.dispatch(batch), manager.dispatch(batch)
            reqs = [each.entry and each.mode is GraphMode.FULL and each.entry.num_reqs for each in (ours, theirs)]
            if reqs[0] != reqs[1] and (reqs[0] or reqs[1]):
                yield f"{batch}: the plan answers {ours}, the observation {theirs}"


def _observer(launched: AppliedLaunch) -> SglangObserver:
    made = SglangObserver(begin=lambda *_: None, event=lambda: None, free=lambda: 0, strict=True)  # type: ignore[arg-type, return-value]
    for (role, phase), runner in launched.runners.items():
        if runner is not None:
            made.built(role if phase == "decode" else None, phase == "prefill", None, runner)
    return made


def compare(own: Any, current: Current, plan: Plan, folder: Path, seen: Counter[str], *, observe: bool) -> list[str]:
    """Return how SGLang differs from one plan; ``observe``: and its observation."""
    command = ["--model-path", "MODEL", *(["--speculative-draft-model-path", "MODEL"] if plan.speculative else [])]
    if plan.lora is not None:
        command += ["--max-lora-rank", "16", "--lora-target-modules", "all"]
    added = launch(plan, command).arguments
    case = drawing.Case(command=(*command, *added), model="llama-3", device="h100")
    planned, environment = decode_sizes_of(plan), case.environment
    record = own.resolve(drawing.written(case, folder), environment)
    current.hooks = PlanHooks(plan, "plan.yaml")
    with own._machine(environment):
        own.m.context.publish(record, role="scheduler", ranks=own.m.context.SpawnRanks(world_rank=0, gpu_id=0))
        lines = [*disagreements(plan, ResolvedFacts.read(own.m.context))]
        if lines:
            return lines
        resolve(seam.SCHEDULER.rpartition(".")[0])(None, None)
        launched = AppliedLaunch(own.m, record, own.models)
        found = [*differences(plan, planned, launched, seen)]
        if observe:
            seen["observations"] += 1
            found += misobserved(launched, plan, planned)
        return found


def main() -> int:
    """Compare and print; exit code 1 on a difference."""
    made = options(__doc__, "sglang")
    made.set_defaults(count=2_000)
    arguments = made.parse_args()
    own = oracle("sglang").Sglang(sources(arguments))
    current = install(own)
    seen: Counter[str] = Counter(plans=0)
    wrong, started = 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for index in range(arguments.count):
            plan = sglang_apply.plan(Random(f"{arguments.seed}:{index}"))
            found = compare(own, current, plan, Path(folder), seen, observe=index % 50 == 0)
            seen["plans"] += 1
            seen["roles"] += len(plan.roles)
            wrong += bool(found)
            for text in found[:5] if wrong < 20 else ():
                say(f"seed {arguments.seed}, plan {index}: {text}")
    return finish("sglang_apply", arguments, dict(seen), wrong, time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
