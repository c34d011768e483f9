"""From a plan and a ``vllm serve`` command line to the flags that the command lacks.

Sizes are not among them: the plugin sets those of each role. ``--max-cudagraph-capture-size`` is, so that the
attention backends know the largest graph whatever becomes of the plugin.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from capture_planner.engines.export import BACKEND, DRAFT_MODEL
from capture_planner.engines.launch import Launch
from capture_planner.engines.parsing import as_words
from capture_planner.errors import FlagError, Problem
from capture_planner.modes import GraphMode, Role
from capture_planner.records.plan import Plan
from capture_planner_vllm.emulation.backends import final_settings
from capture_planner_vllm.emulation.config import Configuration
from capture_planner_vllm.emulation.export import export_vllm, plan_sizes
from capture_planner_vllm.emulation.flags import CommandLine, read
from capture_planner_vllm.emulation.settings import RunnerVersion

_DEFAULTS = {"tensor_parallel_size": 1, "data_parallel_size": 1, "decode_context_parallel_size": 1}
_COMPILATION, _SPECULATIVE, _MODE = "compilation_config", "speculative_config", "cudagraph_mode"


def launch_vllm(plan: Plan, command: Sequence[str]) -> Launch:
    """Return what the words behind ``vllm serve`` lack; raises ``FlagError`` where they contradict the plan.

    Without any word, the arguments are those of a script, and ``DRAFT_MODEL`` is to be replaced in them.
    """
    line = read(command)
    settings = _settings(plan)
    model = settings.pop("model")
    problems = [*_contradictions(plan, line, settings)]
    compilation, problem = _mode(line, settings.pop(_MODE))
    problems += problem
    drafts = settings.pop("speculative-config", None)
    lacking = {name: value for name, value in settings.items() if _given(line, name) is None}
    # Only a command line without contradictions can be resolved.
    refusal = None if problems else _backend_refusal(plan, command, lacking)
    # Where vLLM chooses the target's backend, it chooses the drafter's too.
    if drafts is not None and refusal is not None:
        drafts = {key: value for key, value in drafts.items() if key != "attention_backend"}
    speculative, problem = _drafts(line, drafts, named=bool(command))
    problems += problem
    if problems:
        raise FlagError(problems)
    notes = []
    if refusal is not None:
        notes.append(f"vLLM chooses its own attention backend, which decides the modes: {refusal}")
        del lacking[BACKEND]
    elif BACKEND not in settings:
        notes.append("the plan's attention backend has no name in vLLM; vLLM chooses its own, which decides the modes")
    if "ray" in (line.get("distributed_executor_backend"), line.get("data_parallel_backend")):
        notes.append(
            "Ray's workers get the plan with VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=CAPTURE_PLANNER_ set, and its "
            "file at the same path on each host"
        )
    words = [*as_words(lacking), *compilation, *speculative]
    _refuse_lost_parts(line, command, words)
    if line.model is None:
        words = ["--model", model, *words]
    elif line.model != model:
        notes.append(f"the plan is for {model}, the command serves {line.model}")
    if command:
        notes += _final_notes(plan, [*command, *words])
    return Launch(arguments=tuple(words), notes=tuple(notes))


def _backend_refusal(plan: Plan, command: Sequence[str], lacking: Mapping[str, Any]) -> str | None:
    """Return why vLLM would refuse the plan's attention backend on the plan's machine, or None."""
    if BACKEND not in lacking:
        return None
    words = [*command, f"--{BACKEND}", str(lacking[BACKEND])]
    try:
        final_settings(Configuration(read(words), plan.environment))
    except FlagError as error:
        # Other refusals are vLLM's own to make, on the real machine.
        return next((each.message for each in error.problems if each.path[:1] == (f"--{BACKEND}",)), None)
    return None


def _final_notes(plan: Plan, words: Sequence[str]) -> Iterator[str]:
    """Yield what vLLM makes of the plan under all flags, where that is less than the plan has."""
    try:
        final = final_settings(Configuration(read(words), plan.environment))
    except FlagError:  # vLLM's own to say
        return
    if final.runner is RunnerVersion.V1:
        yield "vLLM runs this on model runner V1, whose one list of sizes is for all roles: it takes no plan"
    elif plan.role(Role.TARGET).mode.has_piecewise and not final.mode.has_piecewise:
        yield f"vLLM resolves {final.mode.value} with these flags, and captures none of the plan's PIECEWISE graphs"


def _settings(plan: Plan) -> dict[str, Any]:
    """Return the flags by name, from the export: the sizes are the plugin's, and the mode the target's own."""
    settings = dict(export_vllm(plan).settings)
    del settings["compilation-config"]
    sizes = plan_sizes(plan, plan.limits.max_num_tokens)
    # In another mode without sizes, vLLM would capture its own list.
    settings[_MODE] = plan.role(Role.TARGET).mode.value if sizes else GraphMode.NONE.value
    if sizes:
        settings["max-cudagraph-capture-size"] = sizes[-1]
    return settings


def _given(line: CommandLine, flag: str) -> Any:
    """Return the value that the command gives to a setting, in a flag of its own or inside a JSON flag, or None."""
    name = flag.replace("-", "_")
    inside = {"attention_backend": ("attention_config", "backend"), "max_cudagraph_capture_size": (_COMPILATION, name)}
    outer, key = inside.get(name, ("", ""))
    return line.get(name, (line.get(outer) or {}).get(key))


def _contradictions(plan: Plan, line: CommandLine, settings: Mapping[str, Any]) -> Iterator[Problem]:
    for name, value in settings.items():
        given = _given(line, name)
        if name in (_MODE, "speculative-config") or given is None:  # `_mode` and `_drafts` compare those
            continue
        if str(given).lower() != str(value).lower():  # vLLM takes a backend's name in any case
            yield _contradiction(f"--{name}", given, value)
    # The export leaves out what is vLLM's default, so there any other value contradicts the plan.
    for name, value in _DEFAULTS.items():
        flag = name.replace("_", "-")
        if flag not in settings and line.get(name, value) != value:
            yield _contradiction(f"--{flag}", line.get(name), value)
    if plan.lora is None and line.get("enable_lora"):
        yield Problem(path=("--enable-lora",), message="the plan has no adapters", remedy="leave it out, or plan them")
    if plan.speculative is None and line.get(_SPECULATIVE):
        yield Problem(path=("--speculative-config",), message="the plan does not speculate", remedy="leave it out")
    for name, why in (
        ("enforce_eager", "the plan has graphs"),
        ("enable_dbo", "no plan has the graphs of half batches that vLLM then captures"),
        ("cudagraph_capture_sizes", "the plugin sets the plan's sizes, by role"),
    ):
        given = line.get(name) or (line.get(_COMPILATION) or {}).get(name)
        if given and (name != "enforce_eager" or settings[_MODE] != GraphMode.NONE.value):
            yield Problem(path=(f"--{name.replace('_', '-')}",), message=why, remedy="leave it out")


def _contradiction(flag: str, given: Any, value: Any) -> Problem:
    return Problem(path=(flag,), message=f"given {given}, the plan has {value}", remedy=f"give {flag} {value}")


def _mode(line: CommandLine, mode: str) -> tuple[list[str], list[Problem]]:
    given = (line.get(_COMPILATION) or {}).get(_MODE)
    if given is None:
        return [f"-cc.{_MODE}={mode}"], []
    if str(given).upper() == mode:
        return [], []
    problem = Problem(
        path=("--compilation-config", _MODE),
        message=f"given {given}, the plan has {mode}",
        remedy=f'give "{_MODE}": "{mode}"',
    )
    return [], [problem]


def _drafts(line: CommandLine, planned: Mapping[str, Any] | None, *, named: bool) -> tuple[list[str], list[Problem]]:
    """Return the words for speculation, which the command must give itself where a draft model is to be named."""
    if planned is None:
        return [], []
    given, path = line.get(_SPECULATIVE), "--speculative-config"
    wanted = json.dumps(planned)
    if given is None:
        if named and planned.get("model") == DRAFT_MODEL:
            message = f"missing: the plan drafts with {planned['method']}, and a plan does not name the draft model"
            return [], [Problem(path=(path,), message=message, remedy=f"give {path} '{wanted}'")]
        return [path, wanted], []
    problems = []
    compared = ("method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "parallel_drafting")
    for key in compared:
        theirs, ours = given.get(key), planned.get(key)
        same = str(theirs).endswith("mtp") if ours == "mtp" else theirs == ours  # such as deepseek_mtp
        if not same:
            remedy = f'give "{key}": {json.dumps(ours)}' if ours is not None else "leave it out"
            problems.append(Problem(path=(path, key), message=f"given {theirs}, the plan has {ours}", remedy=remedy))
    return [], problems


def _refuse_lost_parts(line: CommandLine, command: Sequence[str], words: Sequence[str]) -> None:
    """Refuse a JSON flag whose parts our dotted one would replace: vLLM takes the last of both, and merges none."""
    after = read([*command, *words]).get(_COMPILATION) or {}
    before = line.get(_COMPILATION) or {}
    lost = {key for key, value in before.items() if after.get(key) != value}
    if lost:
        whole = json.dumps({**before, **after})
        message = f"without {_MODE}, and vLLM does not merge two values of it"
        raise FlagError([Problem(path=("--compilation-config",), message=message, remedy=f"give '{whole}'")])
