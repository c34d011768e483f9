"""A program that poses as ``vllm``: it leaves the observations that it is given, and crashes where it is told to.

Its folder has ``observations/NAME.yaml``, NAME being the stem of the plan's file or ``itself``, and ``behaviour.json``:
by NAME, ``crash`` (the exit code before capture), ``code`` (that after serving) or ``wait`` (seconds until it serves).
"""

from __future__ import annotations

import json
import os
import stat
import sys
from functools import cache
from pathlib import Path

import attrs

from capture_planner import codec
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import Reason, Role
from capture_planner.records._base import digest, replace
from capture_planner.records.batch import Batch
from capture_planner.records.observation import BatchCount, Observation
from capture_planner.records.plan import Plan
from capture_planner.records.promise import ExpectedSteps, Promise, PromisedSteps
from support.observing import observation_of

PROGRAM = """\
#!{python} -IS
import json, os, pathlib, shutil, sys, time
home = pathlib.Path({home!r})
environment = os.environ.get
plan = environment("CAPTURE_PLANNER_PLAN")
name = pathlib.Path(plan).stem if plan else "itself"
with open(home / "calls.jsonl", "a") as calls:
    calls.write(json.dumps({{"plan": name, "words": sys.argv[1:], "observe": environment("CAPTURE_PLANNER_OBSERVE"),
                            "profile": environment("CAPTURE_PLANNER_PROFILE")}}) + "\\n")
do = json.loads((home / "behaviour.json").read_text()).get(name, {{}})
if "crash" in do:
    sys.exit(do["crash"])
if environment("CAPTURE_PLANNER_STARTED") and "silent" not in do:
    pathlib.Path(environment("CAPTURE_PLANNER_STARTED")).touch()
(home / "up").touch()
time.sleep(do.get("wait", 0))
observe = environment("CAPTURE_PLANNER_OBSERVE")
if observe:
    os.makedirs(observe, exist_ok=True)
    for source in sorted((home / "observations").glob(name + ".*")):
        rank = source.suffixes[0]
        shutil.copy(source, os.path.join(observe, f"vllm{{rank}}.{{os.getpid()}}.yaml"))
sys.exit(do.get("code", 0))
"""


@cache
def _text(observation: Observation) -> str:
    """Write an observation once: most tests have the same ones."""
    return codec.dumps(observation)


class PosedEngine:
    """The program, and what it is told.

    :param home: its folder; ``bin`` in it belongs in front of the ``PATH``.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "bin").mkdir(parents=True)
        (home / "observations").mkdir()
        program = home / "bin" / "vllm"
        program.write_text(PROGRAM.format(python=sys.executable, home=str(home)), "utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.behave()

    @property
    def path(self) -> str:
        """The ``PATH`` with the program in front."""
        return f"{self.home / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def behave(self, **by_plan: object) -> None:
        """Set what it does, by the stem of a plan's file, or ``itself``."""
        (self.home / "behaviour.json").write_text(json.dumps(by_plan), "utf-8")

    def observes(self, name: str, observation: Observation, ranks: int = 1) -> None:
        """Set what it leaves: an observation for each of so many tensor-parallel workers."""
        for rank in range(ranks):
            own = replace(observation, rank=rank, world_size=ranks)
            file = self.home / "observations" / f"{name}.rank{rank}.yaml"
            file.write_text(_text(own), "utf-8")

    @property
    def calls(self) -> list[dict[str, object]]:
        """What it was called with, the first call first."""
        file = self.home / "calls.jsonl"
        return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def promised(plan: Plan, milliseconds: float, *, graphs: int | None = None) -> Plan:
    """Return a plan of fewer graphs that promises so many milliseconds for each decode, where 10 were taken before.

    :param graphs: the target's graphs that are left; None: all.
    """
    target = plan.role(Role.TARGET)
    left = replace(target, entries=target.entries[:graphs])

    def side(each: float) -> ExpectedSteps:
        row = PromisedSteps(
            role=Role.TARGET,
            query_len=1,
            first=1,
            last=plan.limits.max_num_reqs,
            mode=target.entries[-1].mode,
            milliseconds=each,
            share=1.0,
        )
        return ExpectedSteps(mean_step_ms=each, error_ms=0.01, rows=(row,))

    roles = tuple(left if role is target else role for role in plan.roles)
    promise = Promise(costs="vllm 0.33.0", steps=5000, before=side(10.0), after=side(milliseconds))
    return replace(plan, roles=roles, promise=promise)


def served(
    plan: Plan, milliseconds: float, *, reqs: int = 4, steps: int = 5000, by_itself: bool = False
) -> Observation:
    """Return an observation of decodes of so many requests, each of which took so long.

    :param by_itself: whether the plan's graphs are the engine's own.
    """
    seen = observation_of(plan)
    entry = Dispatcher(plan).dispatch(Batch.decode(Role.TARGET, reqs, 1)).entry
    graph = None if entry is None else plan.role(Role.TARGET).entries.index(entry)
    count = BatchCount(
        num_reqs=reqs,
        num_tokens=reqs,
        query_len=1,
        steps=steps,
        graph=graph,
        reason=Reason.UNCOVERED if graph is None else None,
        interval=milliseconds,
        intervals=steps,
        interval_error=0.01,
    )
    roles = tuple(
        replace(
            role,
            batches=(count,),
            graphs=tuple(
                graph_ if number != graph else attrs.evolve(graph_, replays=steps)
                for number, graph_ in enumerate(role.graphs)
            ),
        )
        if role.role is Role.TARGET
        else role
        for role in seen.roles
    )
    return replace(seen, roles=roles, device="NVIDIA H100 80GB HBM3", plan=None if by_itself else digest(plan))
