"""``speculative_config`` of a file -> ``Drafting``: what the engine's configuration classes make of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capture_planner.engines.parsing import did_you_mean
from capture_planner_tensorrt_llm.flags import OPTIONS
from capture_planner_tensorrt_llm.settings import ALGORITHMS, Drafting
from capture_planner_tensorrt_llm.values import Path, Problems, boolean, integer, mapping, only, shown

_CONFIG = "--config"

_NOT_EMULATED = ("SaveState", "User_Provided", "DSpark", "AUTO")
_MOST_DRAFTS = 255


def read_drafting(value: Any, problems: Problems) -> Drafting | None:
    """Return ``speculative_config``."""
    path: Path = (_CONFIG, "speculative_config")
    data = mapping(value, path, problems)
    if data is None:
        return None
    kind = data.get("decoding_type")
    # Known to the engine: no spelling mistake, and no refusal of the engine's.
    if kind in _NOT_EMULATED:
        problems.skip((*path, "decoding_type"), f"the graphs of {kind}")
        return None
    if not isinstance(kind, str) or kind not in ALGORITHMS:
        known = (*ALGORITHMS, *_NOT_EMULATED)
        remedy = did_you_mean(str(kind), known, f"give one of {', '.join(known)}")
        problems.refuse((*path, "decoding_type"), f"unknown decoding_type {shown(kind)}", remedy)
        return None
    keys = OPTIONS["speculative_keys"]
    only(data, (*keys["any"], *keys[kind]), path, problems)
    drafts = _max_draft_len(kind, data, path, problems)
    if drafts is None:
        return None
    schedule = _schedule(data.get("draft_len_schedule"), drafts, (*path, "draft_len_schedule"), problems)
    concurrency = data.get("max_concurrency")
    most = None if concurrency is None else integer(concurrency, (*path, "max_concurrency"), problems, low=1)
    if most is not None and schedule is not None:
        problems.refuse(
            (*path, "max_concurrency"),
            "it and draft_len_schedule exclude each other: the schedule gives where drafting ends",
            "leave one out",
        )
    total = _total(data, drafts, path, problems)
    algorithm = ALGORITHMS[kind]
    changing = schedule is not None or most is not None
    if changing and total != drafts:
        problems.skip((*path, "use_dynamic_tree"), "a tree of drafts whose length changes", "leave it out")
    if changing and data.get("use_mtp_vanilla"):
        problems.skip((*path, "use_mtp_vanilla"), "a length of drafts that changes, for vanilla MTP")
    # The engine turns the limit of a one-engine method into a schedule of one threshold.
    if most is not None and algorithm.dynamic and schedule is None:
        schedule, most = {most: drafts}, None
    # K of a plan is at most 255.
    longest = 2 * drafts - 1 if algorithm.doubled else total
    if longest > _MOST_DRAFTS:
        problems.skip((*path, "max_draft_len"), f"decodes of {1 + longest} tokens a request", "draft fewer tokens")
    return Drafting(
        decoding_type=kind, max_draft_len=drafts, total_draft_tokens=total, schedule=schedule, max_concurrency=most
    )


def _max_draft_len(kind: str, data: Mapping[str, Any], path: Path, problems: Problems) -> int | None:
    """Return K. MTP may leave it to the checkpoint, which is not available here."""
    name, value = "max_draft_len", data.get("max_draft_len")
    # The older name of the same number, which the engine still reads.
    if kind == "MTP" and "max_draft_len" not in data and "num_nextn_predict_layers" in data:
        name, value = "num_nextn_predict_layers", data["num_nextn_predict_layers"]
    where = (*path, name)
    if value is None and kind == "MTP":
        problems.skip(where, "a length that the checkpoint decides", "give max_draft_len")
        return None
    number = None if value is None else integer(value, where, problems)
    if value is not None and number is None:
        return None
    if number is None or number < 1:
        value = "is not set" if number is None else f"is {number}"
        problems.refuse(where, f"{kind} must draft at least one token, and it {value}", "give 1 or more")
        return None
    return number


def _schedule(value: Any, drafts: int, path: Path, problems: Problems) -> dict[int, int] | None:
    data = None if value is None else mapping(value, path, problems)
    if data is None:
        return None
    found: dict[int, int] = {}
    before = len(problems)
    for key, length in data.items():
        where = (*path, str(key))
        threshold, draft_len = integer(key, where, problems, low=1), integer(length, where, problems, low=0)
        if threshold is None or draft_len is None:
            continue
        found[threshold] = draft_len
        if draft_len > drafts:
            says = f"a length of {draft_len} is more than max_draft_len, {drafts}"
            problems.refuse(where, says, f"give at most {drafts}")
    # Half of a schedule would be judged by rules that the whole one may keep.
    if len(problems) > before:
        return None
    if not found:
        problems.refuse(path, "it is empty", "give a threshold and its length, or leave it out")
        return None
    first = min(found)
    if found[first] != drafts:
        problems.refuse(
            (*path, str(first)),
            f"its smallest threshold drafts {found[first]}, and must draft max_draft_len, {drafts}",
            f"give {first}: {drafts}",
        )
        return None
    # A plan's schedule has at most 64 tiers, the one above the last threshold included.
    if len(found) > 63 or max(found) > 1 << 20:
        problems.skip(path, "more than 63 thresholds, or one above a million", "give fewer")
        return None
    return dict(sorted(found.items()))


def _total(data: Mapping[str, Any], drafts: int, path: Path, problems: Problems) -> int:
    """Return the drafts that a step verifies of one request."""
    if data.get("eagle_choices") is not None:
        problems.skip((*path, "eagle_choices"), "a static tree of drafts")
        return drafts
    given, total_path = data.get("max_total_draft_tokens"), (*path, "max_total_draft_tokens")
    if not boolean(data.get("use_dynamic_tree", False), (*path, "use_dynamic_tree"), problems):
        # All but Eagle write K over what was given for the tokens of a tree.
        if given is not None and str(data["decoding_type"]).startswith("Eagle") and given != drafts:
            problems.skip(total_path, "a chain of drafts with the tokens of a tree")
        return drafts
    where = (*path, "dynamic_tree_max_topK")
    wide = data.get("dynamic_tree_max_topK")
    breadth = None if wide is None else integer(wide, where, problems)
    # A value that is no number has its problem already.
    if breadth is None or breadth < 1:
        if wide is None or breadth is not None:
            problems.refuse(where, "a dynamic tree needs a value of at least 1", "give 1 or more")
        return drafts
    # The engine's default: topK tokens at each of the K levels.
    if given is None:
        return breadth * drafts
    total = integer(given, total_path, problems)
    if total is not None and not drafts <= total <= breadth * drafts:
        says = f"expected {drafts} to {breadth * drafts}, got {total}"
        problems.refuse(total_path, says, "remove it, or set a number of this range")
    return drafts if total is None else total
