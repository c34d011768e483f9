"""The flags that a command of SGLang needs, so that it executes a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from capture_planner.engines.export import DRAFT_MODEL
from capture_planner.engines.launch import Launch
from capture_planner.engines.parsing import as_words
from capture_planner.errors import FlagError, Problem
from capture_planner.modes import Role
from capture_planner.records.batch_space import decode_tiers
from capture_planner.records.plan import Plan
from capture_planner_sglang.emulation.export import decode_sizes_of, export_sglang
from capture_planner_sglang.emulation.flags import parse_any

_UNKNOWN_TO_A_PLAN = ("max-lora-rank", "lora-target-modules")
_NAMED_BY_USERS = ("model_path", "speculative_draft_model_path")
_CONTRARY = {
    "disable_cuda_graph": "the plan's graphs would not be captured",
    "disable_cuda_graph_padding": "the plan pads batches to its sizes",
    "disable_decode_cuda_graph": "the plan's graphs would not be captured",
    "enable_two_batch_overlap": "no plan has the graphs of overlapping microbatches that SGLang then captures",
    "not_emulated:--speculative-adaptive": "the plan drafts the same number at all times",
    **dict.fromkeys(("cuda_graph_config", "cuda_graph_max_bs_decode"), "the plan gives the sizes of decodes"),
}
"""Flags that a plan leaves no room for, and why."""


def launch(plan: Plan, command: Sequence[str]) -> Launch:
    """Return what to add to ``command``, SGLang's own words after the program.

    Raises ``FlagError`` for each flag that contradicts the plan, with the value to give, and where SGLang cannot
    execute the plan at all. Without any word, the arguments are for a script, and ``DRAFT_MODEL`` is to be replaced
    in them, and what SGLang cannot do is a note.
    """
    parsed, sources = parse_any(command)
    args, given = vars(parsed), set(sources)
    planned, wanted = decode_sizes_of(plan), _settings(plan)
    problems = [*_unplanned(plan, given)]
    for name, value in wanted.items():
        dest = name.replace("-", "_")
        if dest in given and not _same(dest, args.get(dest), value):
            words = " ".join(as_words({name: value})) or f"without --{name}"
            problems.append(Problem(path=(f"--{name}",), message="it contradicts the plan", remedy=f"give {words}"))
    for dest, why in _CONTRARY.items():
        if dest in given:
            flag = f"--{dest.rpartition(':--')[2].replace('_', '-')}"
            problems.append(Problem(path=(flag,), message=why, remedy="remove it"))
    notes = list(dict.fromkeys(decision.message for decision in planned.decisions))
    if problems and command:
        raise FlagError(problems)
    notes += [f"{problem.message}; {problem.remedy}" for problem in problems]
    if "model_path" in given and args["model_path"] != plan.model.name:
        notes.append(f"the plan is for {plan.model.name}, the command serves {args['model_path']}")
    # A flag that was not given has its default.
    missing = {name: value for name, value in wanted.items() if args.get(name.replace("-", "_")) != value}
    added = {name: value for name, value in missing.items() if name.replace("-", "_") not in given}
    return Launch(arguments=tuple(as_words(added)), notes=tuple(notes))


def _settings(plan: Plan) -> dict[str, Any]:
    """SGLang's settings under the plan: as in its export, with the decode sizes of all roles."""
    settings = {name: value for name, value in export_sglang(plan).settings.items() if name not in _UNKNOWN_TO_A_PLAN}
    settings["tp-size"] = plan.parallel.tensor
    planned = decode_sizes_of(plan)
    for name in ("cuda-graph-backend-decode", "cuda-graph-max-bs-decode", "cuda-graph-bs-decode"):
        settings.pop(name, None)
    sizes = planned.all()
    if sizes:
        settings |= {"cuda-graph-backend-decode": "full", "cuda-graph-bs-decode": list(sizes)}
    elif planned.by_role.get(Role.TARGET) == ():  # eager on purpose; None keeps SGLang's own sizes
        settings["cuda-graph-backend-decode"] = "disabled"
    return settings


def _same(dest: str, given: object, wanted: object) -> bool:
    """Whether two values mean the same: NEXTN is EAGLE there, lists have no order, and paths are the user's."""
    if given == wanted or dest in _NAMED_BY_USERS:
        return True
    if dest == "speculative_algorithm":
        return {given, wanted} == {"EAGLE", "NEXTN"}
    return isinstance(given, list) and isinstance(wanted, list) and sorted(given) == sorted(wanted)


def _unplanned(plan: Plan, given: set[str]) -> Iterator[Problem]:
    """Yield what the user has to give, as a plan does not know it, and what SGLang cannot do."""
    tiers = {k for *_, k in decode_tiers(plan)}
    if len(tiers) > 1:
        yield Problem(
            message=f"the plan drafts {', '.join(map(str, sorted(tiers)))} tokens by batch size, SGLang one number",
            remedy="make the plan without a schedule",
        )
    drafter = "speculative_draft_model_path"
    if given and DRAFT_MODEL in export_sglang(plan).settings.values() and drafter not in given:
        says = "the plan has a drafter, whose path it does not know"
        yield Problem(path=("--speculative-draft-model-path",), message=says, remedy="give its folder or name")
    if plan.speculative is None and "speculative_algorithm" in given:
        yield Problem(path=("--speculative-algorithm",), message="the plan has no speculation", remedy="remove it")
    if plan.lora is None and given & {"enable_lora", "lora_paths"}:
        yield Problem(path=("--enable-lora",), message="the plan has no adapters", remedy="remove the adapters' flags")
