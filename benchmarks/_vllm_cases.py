"""The engines that vllm_in_process.py compares: the words of ``vllm serve``, and the plan of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from _bench import ROOT
from _model_configs import CONFIGS

from capture_planner.codec import dumps, load_environment
from capture_planner.engines import find_engine
from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import DraftModel, Method, Model, ScheduleSource, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Limits, Policy, Roles, RoleSpec, Sizes, Spec

REQUESTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 100, 128, 160, 200, 256)
"""The plan's sizes of every role: 45 graphs."""
LOADS = (1, 8, 16, 48, 100, 200, 256)
SCHEDULE = ((1, 16, 5), (17, 64, 3), (65, 256, 1))
ACCEPTANCE = (0.75, 0.56, 0.42, 0.32, 0.24)
"""Share of steps in which drafts 0 to i are accepted: three in four of each draft, if those before it are."""
FIXED = (1, 3, 5)
TUNED = "plan, schedule"


@attrs.frozen(kw_only=True)
class Case:
    """One engine: the words of ``vllm serve`` without a plan, and the plan that it runs under."""

    name: str
    words: tuple[str, ...]
    plan: Plan | None = None
    compared: bool = True
    """Whether loads are repeated: figures that are compared within a few percent need it."""


@attrs.frozen(kw_only=True)
class Group:
    """Cases that alternate, and the loads that each serves."""

    name: str
    cases: tuple[Case, ...]
    loads: tuple[int, ...]
    prompt: int = 128
    output: int = 192
    tokens: bool = False
    dispatch: bool = False
    pair: tuple[str, str] | None = None
    """Cases whose decode steps are compared in neighbouring blocks: the plan and what it must keep up with."""
    rated: str | None = None
    """A case that is compared with each other one in the same way, by the time for a token."""


EAGLE = Speculative(method=Method.EAGLE3, num_tokens=3, model=DraftModel(vocab_size=32000))


def planned(
    shape: str,
    sizes: Sizes,
    mode: GraphMode,
    drafts: Speculative | None,
    backend: str,
    measurements: Measurements | None = None,
    **roles: Any,
) -> Plan:
    """Return the plan of a server of 256 requests on an H200; ``roles`` are specs by role name."""
    spec = server_spec(shape, sizes, mode, drafts, backend, Roles(**roles))
    environment = load_environment(ROOT / "plans" / "environments" / "h200.yaml")
    return make_plan(spec, environment, registry.load_backends(), measurements)


def server_spec(
    shape: str, sizes: Sizes, mode: GraphMode, drafts: Speculative | None, backend: str, roles: Roles, **others: Any
) -> Spec:
    """Return the spec of a server of 256 requests; ``others`` are further fields of the spec."""
    config = CONFIGS[shape]
    return Spec(
        model=Model(
            name=f"Qwen3 {shape} shape",
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            max_model_len=4096,
        ),
        limits=Limits(max_num_reqs=256, max_num_tokens=8192),
        mode=mode,
        backend=backend,
        sizes=sizes,
        speculative=drafts,
        roles=roles,
        **others,
    )


def under_plan(plan: Plan | None, words: Sequence[str], file: Path) -> tuple[list[str], dict[str, str]]:
    """Write a plan to ``file``; return vLLM's command line and the variables that make it run the plan, if any."""
    if plan is None:
        return list(words), {}
    file.write_text(dumps(plan), encoding="utf-8")
    launch = find_engine("vllm").launch
    more = () if launch is None else launch(plan, words).arguments
    return [*words, *more], {"CAPTURE_PLANNER_PLAN": str(file)}


def groups(folder: Path, utilization: float, profile: Profile | None = None) -> Iterator[Group]:
    """Yield the groups; ``folder`` has a model folder for each of CONFIGS.

    :param profile: the times that the group ``schedule`` chooses its draft lengths by; None: without that group.
    """
    sizes = Sizes(policy=Policy.EXPLICIT, num_reqs=REQUESTS)
    full = GraphMode.FULL_DECODE_ONLY

    def words(shape: str, **others: Any) -> tuple[str, ...]:
        common = {
            "model": folder / shape, "load-format": "dummy", "skip-tokenizer-init": True, "seed": 0,
            "max-model-len": 4096, "max-num-seqs": 256, "max-num-batched-tokens": 8192,
            "gpu-memory-utilization": utilization * (2.2 if shape == "large" else 1),
        }  # fmt: skip
        options = [(f"--{name}", value) for name, value in (common | others).items()]
        return tuple(word for name, value in options for word in ([name] if value is True else [name, _written(value)]))

    def drafting(shape: str, tokens: int = 3, *, synthetic: bool = True, **others: Any) -> dict[str, Any]:
        options = {"method": "eagle3", "model": str(folder / f"{shape}-drafter"), "num_speculative_tokens": tokens}
        if synthetic:
            options |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1 + tokens / 2}
        return options | others

    def graphs(mode: GraphMode) -> dict[str, Any]:
        return {"mode": 0, "cudagraph_mode": mode.value}

    def serving(shape: str) -> tuple[str, ...]:
        return words(shape, **{"speculative-config": drafting(shape), "compilation-config": graphs(full)})

    largest = ("--max-cudagraph-capture-size", "1024")
    small, plan = serving("small"), planned("small", sizes, full, EAGLE, "flash_attention")
    eager = RoleSpec(mode=GraphMode.NONE)
    yield Group(
        name="main",
        loads=LOADS,
        dispatch=True,
        pair=("plan", "flags of check"),
        cases=(
            Case(name="vLLM by itself", compared=False, words=small),
            Case(name="flags of check", words=(*small, *largest)),
            Case(name="plan", words=small, plan=plan),
            Case(
                name="plan, draft decodes eager",
                compared=False,
                words=small,
                plan=planned("small", sizes, full, EAGLE, "flash_attention", draft_decode=eager),
            ),
            Case(
                name="all eager",
                compared=False,
                words=words(
                    "small", **{"speculative-config": drafting("small"), "compilation-config": graphs(GraphMode.NONE)}
                ),
            ),
        ),
    )
    dynamic = words(
        "small",
        **{
            "speculative-config": drafting(
                "small", 5, num_speculative_tokens_per_batch_size=[list(tier) for tier in SCHEDULE]
            ),
            "compilation-config": graphs(full),
        },
    )
    scheduled = Speculative(method=Method.EAGLE3, num_tokens=5, schedule=SCHEDULE, model=DraftModel(vocab_size=32000))
    yield Group(
        name="dynamic",
        loads=(8, 16, 48, 100, 200, 256),
        cases=(
            Case(name="vLLM by itself", words=dynamic),
            Case(name="plan", words=dynamic, plan=planned("small", sizes, full, scheduled, "flash_attention")),
        ),
    )
    if profile is not None:
        yield _schedule(
            profile,
            sizes,
            lambda k, **others: words(
                "small",
                **{
                    "speculative-config": drafting("small", k, synthetic=False, **_synthetic(k), **others),
                    "compilation-config": graphs(full),
                },
            ),
        )
    compiled = words("small")
    default = Sizes(policy=Policy.EXPLICIT, num_reqs=REQUESTS, num_tokens=(*REQUESTS, 512))
    yield Group(
        name="compile",
        loads=(64,),
        output=128,
        pair=("plan", "vLLM by itself"),
        cases=(
            Case(name="vLLM by itself", words=compiled),
            Case(
                name="plan",
                words=compiled,
                plan=planned("small", default, GraphMode.FULL_AND_PIECEWISE, None, "flash_attention"),
            ),
        ),
    )
    exact: dict[str, Any] = {
        "dtype": "float32",
        "attention-backend": "TRITON_ATTN",
        "speculative-config": drafting("small", synthetic=False),
    }
    own = words("small", **exact, **{"compilation-config": graphs(full)})
    yield Group(
        name="greedy",
        loads=(3, 17, 100),
        output=48,
        tokens=True,
        cases=(
            Case(name="vLLM by itself", words=own),
            Case(name="plan", words=own, plan=planned("small", sizes, full, EAGLE, "triton")),
            Case(name="all eager", words=words("small", **exact, **{"compilation-config": graphs(GraphMode.NONE)})),
        ),
    )
    large = serving("large")
    yield Group(
        name="large",
        loads=(1, 48, 200),
        pair=("plan", "flags of check"),
        cases=(
            Case(name="vLLM by itself", compared=False, words=large),
            Case(name="flags of check", words=(*large, *largest)),
            Case(name="plan", words=large, plan=planned("large", sizes, full, EAGLE, "flash_attention")),
        ),
    )


def _synthetic(k: int) -> dict[str, Any]:
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(ACCEPTANCE[:k])}


def _schedule(profile: Profile, sizes: Sizes, serving: Callable[..., tuple[str, ...]]) -> Group:
    """Return each fixed K, the schedule that a plan chooses by the profile, and vLLM's own adaptive verification.

    Plans have the same sizes of requests, so only K differs. Adaptive verification drafts the most, and cuts the drafts
    to verify by the acceptance that it estimates from the draft's logits: vLLM 0.33 has it for every drafter whose
    attention backend has graphs of mixed query lengths (FlashAttention 3), though its option's text says DSpark only.

    :param serving: from K and more of the speculative configuration to words.
    """
    drafter = DraftModel(vocab_size=32000)

    def plan(measurements: Measurements | None = None, **fields: Any) -> Plan:
        drafts = Speculative(method=Method.EAGLE3, model=drafter, acceptance=ACCEPTANCE, **fields)
        return planned("small", sizes, GraphMode.FULL_DECODE_ONLY, drafts, "flash_attention", measurements)

    tuned = plan(Measurements(profile=profile), num_tokens=len(ACCEPTANCE), schedule=ScheduleSource.MEASURED)
    assert tuned.speculative is not None
    tiers = [list(tier) for tier in tuned.speculative.ranges]
    by_size = {"num_speculative_tokens_per_batch_size": tiers} if tiers else {}
    largest = ("--max-cudagraph-capture-size", str(256 * (1 + len(ACCEPTANCE))))
    adaptive = serving(len(ACCEPTANCE), enable_adaptive_verification=True)
    return Group(
        name="schedule",
        loads=(1, 4, 16, 48, 100, 160, 256),
        rated=TUNED,
        cases=(
            *(Case(name=f"plan, K={k}", words=serving(k), plan=plan(num_tokens=k)) for k in FIXED),
            Case(name=TUNED, words=serving(tuned.speculative.num_tokens, **by_size), plan=tuned),
            Case(name="vLLM, adaptive verification", words=(*adaptive, *largest)),
        ),
    )


def _written(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)
