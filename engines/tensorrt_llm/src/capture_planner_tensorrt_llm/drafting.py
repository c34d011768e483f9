"""``speculative_config`` of a file -> ``Drafting``: what the engine's configuration classes make of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capture_planner.engines.parsing import did_you_mean
from capture_planner_tensorrt_llm.settings import ALGORITHMS, Drafting
from capture_planner_tensorrt_llm.values import Path, Problems, integer, mapping, only, shown, truth

_CONFIG = "--config"

_ANY_DECODING = (
    "decoding_type",
    "max_draft_len",
    "max_total_draft_tokens",
    "speculative_model",
    "speculative_model_dir",
    "max_concurrency",
    "draft_len_schedule",
    "load_format",
    "acceptance_rate_window_size",
    "acceptance_rate_threshold",
    "use_rejection_sampling",
    "allow_advanced_sampling",
    "advanced_sampling_mode",
    "enable_penalty",
)
_EAGLE = (
    "eagle_choices",
    "greedy_sampling",
    "posterior_threshold",
    "use_dynamic_tree",
    "dynamic_tree_max_topK",
    "num_eagle_layers",
    "max_non_leaves_per_layer",
    "eagle3_one_model",
    "eagle3_layers_to_capture",
    "eagle3_model_arch",
)
_OWN_DECODING: dict[str, tuple[str, ...]] = {
    "Eagle": _EAGLE,
    "Eagle3": (*_EAGLE, "sa_config"),
    "MTP": (
        "use_relaxed_acceptance_for_thinking",
        "relaxed_topk",
        "relaxed_delta",
        "use_mtp_vanilla",
        "mtp_eagle_one_model",
        "use_dynamic_tree",
        "dynamic_tree_max_topK",
        "sa_config",
        "num_nextn_predict_layers",
        "begin_thinking_phase_token",
        "end_thinking_phase_token",
    ),
    "Draft_Target": (),
    "SA": ("max_matching_ngram_size", "enable_global_pool", "global_pool_size"),
    "PARD": ("mask_token_id", "sa_config"),
    "DFlash": ("mask_token_id", "target_layer_ids", "attention_backend"),
    "NGram": ("max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool"),
}
_NEEDS_MODEL = ("Eagle", "Eagle3", "Draft_Target")
_UNFOLLOWED = ("SaveState", "User_Provided", "DSpark", "AUTO")
_MOST_DRAFTS = 255


def read_drafting(value: Any, problems: Problems) -> Drafting | None:
    """Return ``speculative_config``."""
    path: Path = (_CONFIG, "speculative_config")
    data = mapping(value, path, problems)
    if data is None:
        return None
    kind = data.get("decoding_type")
    if kind in _UNFOLLOWED:
        problems.unfollowed((*path, "decoding_type"), f"the graphs of {kind}", remedy="leave it out")
        return None
    if not isinstance(kind, str) or kind not in ALGORITHMS:
        known = (*ALGORITHMS, *_UNFOLLOWED)
        remedy = did_you_mean(str(kind), known, f"give one of {', '.join(known)}")
        problems.refused((*path, "decoding_type"), f"it knows no {shown(kind)}", remedy=remedy)
        return None
    only(data, (*_ANY_DECODING, *_OWN_DECODING[kind]), path, problems)
    if kind in _NEEDS_MODEL and not any(
        data.get(key) for key in ("speculative_model", "speculative_model_dir")
    ):
        problems.refused((*path, "speculative_model"), f"{kind} needs a draft model", remedy="name one")
    drafts = _max_draft_len(kind, data, path, problems)
    if drafts is None:
        return None
    schedule = _schedule(data.get("draft_len_schedule"), drafts, (*path, "draft_len_schedule"), problems)
    concurrency = data.get("max_concurrency")
    most = None if concurrency is None else integer(concurrency, (*path, "max_concurrency"), problems, low=1)
    if most is not None and schedule is not None:
        problems.refused(
            (*path, "max_concurrency"),
            "it and draft_len_schedule exclude each other",
            "the schedule says where drafting ends",
            remedy="leave one out",
        )
    total = _total(data, drafts, path, problems)
    algorithm = ALGORITHMS[kind]
    changing = schedule is not None or most is not None
    if changing and total != drafts:
        problems.unfollowed(
            (*path, "use_dynamic_tree"), "a tree of drafts whose length changes", remedy="leave it out"
        )
    if changing and data.get("use_mtp_vanilla"):
        ours = "a length of drafts that changes, for vanilla MTP"
        problems.unfollowed((*path, "use_mtp_vanilla"), ours, remedy="leave it out")
    if most is not None and algorithm.dynamic and schedule is None:
        schedule, most = {most: drafts}, None
    longest = 2 * drafts - 1 if algorithm.doubled else total
    if longest > _MOST_DRAFTS:
        ours = f"decodes of {1 + longest} tokens a request"
        problems.unfollowed((*path, "max_draft_len"), ours, remedy="draft fewer tokens")
    return Drafting(
        decoding_type=kind,
        max_draft_len=drafts,
        total_draft_tokens=total,
        schedule=schedule,
        max_concurrency=most,
    )


def _max_draft_len(kind: str, data: Mapping[str, Any], path: Path, problems: Problems) -> int | None:
    """Return K. MTP may leave it to the checkpoint, which is not here to be asked."""
    name, value = "max_draft_len", data.get("max_draft_len")
    if kind == "MTP" and "max_draft_len" not in data and "num_nextn_predict_layers" in data:
        name, value = "num_nextn_predict_layers", data["num_nextn_predict_layers"]
    where = (*path, name)
    if value is None and kind == "MTP":
        problems.unfollowed(where, "a length that the checkpoint decides", remedy="give max_draft_len")
        return None
    number = None if value is None else integer(value, where, problems)
    if value is not None and number is None:
        return None
    if number is None or number < 1:
        given = "is not given" if number is None else f"is {number}"
        says = f"{kind} has to draft at least one token, and it {given}"
        problems.refused(where, says, remedy="give 1 or more")
        return None
    return number


def _schedule(value: Any, drafts: int, path: Path, problems: Problems) -> dict[int, int] | None:
    """Return a schedule, ascending by threshold."""
    data = None if value is None else mapping(value, path, problems)
    if data is None:
        return None
    found: dict[int, int] = {}
    before = len(problems.found)
    for key, length in data.items():
        where = (*path, str(key))
        threshold, draft_len = integer(key, where, problems, low=1), integer(length, where, problems, low=0)
        if threshold is None or draft_len is None:
            continue
        found[threshold] = draft_len
        if draft_len > drafts:
            says = f"a length of {draft_len} is more than max_draft_len, {drafts}"
            problems.refused(where, says, remedy=f"give at most {drafts}")
    if len(problems.found) > before:
        return None
    if not found:
        problems.refused(path, "it is empty", remedy="give a threshold and its length, or leave it out")
        return None
    first = min(found)
    if found[first] != drafts:
        problems.refused(
            (*path, str(first)),
            f"its least threshold drafts {found[first]}, and has to draft max_draft_len, {drafts}",
            remedy=f"give {first}: {drafts}",
        )
        return None
    if len(found) > 63 or max(found) > 1 << 20:
        problems.unfollowed(path, "more than 63 thresholds, or one above a million", remedy="give fewer")
        return None
    return dict(sorted(found.items()))


def _total(data: Mapping[str, Any], drafts: int, path: Path, problems: Problems) -> int:
    """Return the drafts that a step verifies of one request."""
    if data.get("eagle_choices") is not None:
        problems.unfollowed((*path, "eagle_choices"), "a static tree of drafts", remedy="leave it out")
        return drafts
    if not (
        "use_dynamic_tree" in data and truth(data["use_dynamic_tree"], (*path, "use_dynamic_tree"), problems)
    ):
        return _linear_total(data, drafts, path, problems)
    where = (*path, "dynamic_tree_max_topK")
    wide = data.get("dynamic_tree_max_topK")
    breadth = None if wide is None else integer(wide, where, problems)
    if breadth is None or breadth < 1:
        if wide is None or breadth is not None:
            problems.refused(where, "a dynamic tree needs it, and at least 1", remedy="give 1 or more")
        return drafts
    given = data.get("max_total_draft_tokens")
    if given is None:
        return breadth * drafts
    where = (*path, "max_total_draft_tokens")
    total = integer(given, where, problems)
    if total is not None and not drafts <= total <= breadth * drafts:
        says = f"it is {total}, and has to be {drafts} to {breadth * drafts}"
        problems.refused(where, says, remedy="leave it out, or give one of these")
        return drafts
    return drafts if total is None else total


def _linear_total(data: Mapping[str, Any], drafts: int, path: Path, problems: Problems) -> int:
    """Return K: all but Eagle write it over what was given for the tokens of a tree."""
    given = data.get("max_total_draft_tokens")
    if given is not None and str(data["decoding_type"]).startswith("Eagle") and given != drafts:
        where = (*path, "max_total_draft_tokens")
        problems.unfollowed(where, "a chain of drafts with the tokens of a tree", remedy="leave it out")
    return drafts
