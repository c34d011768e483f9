"""vLLM: what it captures and how it dispatches, from the arguments of ``vllm serve``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from capture_planner.engines import checkpoints
from capture_planner.engines.checkpoints import KNOWN
from capture_planner.engines.emulation import Emulation, Setting
from capture_planner.engines.engine import DYNAMO, OTHER_DEVICE, Engine
from capture_planner.engines.parsing import refusal
from capture_planner.errors import FlagError, InvalidValue
from capture_planner.modes import GraphMode
from capture_planner.records.batch_space import DecodeFamily, Domain
from capture_planner.records.environment import Environment
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Limits, Lora, Parallel
from capture_planner_vllm.emulation.backends import final_settings
from capture_planner_vllm.emulation.config import Configuration
from capture_planner_vllm.emulation.export import BACKENDS, LATENT_BACKENDS, export_vllm
from capture_planner_vllm.emulation.families import check_families, encoder_graphs, note_stages, shown_families
from capture_planner_vllm.emulation.fixes import VllmFixes
from capture_planner_vllm.emulation.flags import HISTORY, name_of, read
from capture_planner_vllm.emulation.launch import launch_vllm
from capture_planner_vllm.emulation.logs import LOGS
from capture_planner_vllm.emulation.managers import managers
from capture_planner_vllm.emulation.model import COUNTS_AS, ModelFacts
from capture_planner_vllm.emulation.refusals import OBSERVE, not_emulated
from capture_planner_vllm.emulation.releases import NEWEST, RELEASES, followed
from capture_planner_vllm.emulation.settings import RunnerVersion, VllmSettings
from capture_planner_vllm.emulation.tables import rules
from capture_planner_vllm.emulation.unemulated import REGISTERED

FLAGS: dict[str, str] = {**rules()["flags"], **rules()["variables"]}
"""The flags and variables that affect graphs, each with its help."""
_METHODS = {"eagle": Method.EAGLE, "eagle3": Method.EAGLE3, "mtp": Method.MTP}


def resolve(command: Sequence[str], environment: Environment) -> tuple[VllmSettings, Configuration]:
    """Return the settings and the configuration that led to them; raises ``FlagError`` as vLLM would."""
    configuration = Configuration(read(command), environment)
    settings = final_settings(configuration)
    return attrs.evolve(settings, encoders=encoder_graphs(settings, configuration)), configuration


def emulate(command: Sequence[str], environment: Environment) -> Emulation:
    """Return what vLLM does with the arguments of ``vllm serve`` on a machine; raises ``FlagError``."""
    try:
        settings, configuration = resolve(command, environment)
    except FlagError as error:
        from capture_planner.engines.yaml_files import in_its_file

        raise in_its_file(error, command, name_of) from None
    captures = settings.mode is not GraphMode.NONE
    if captures and settings.sizes and settings.sizes[0] < 1:
        message = f"vLLM accepts it and fails when it captures a graph of {settings.sizes[0]} tokens"
        raise refusal("--cudagraph-capture-sizes", message, "give sizes from 1 on")
    check_families(settings)
    note_stages(configuration)
    speculative, ranks = _speculative(settings), configuration
    return Emulation(
        engine="vllm",
        version=followed(),
        command=tuple(command),
        settings=_shown(settings, configuration),
        sizes=settings.sizes,
        asked_sizes=configuration.listed_sizes,
        managers=managers(settings),
        encoders=settings.encoders,
        decisions=tuple(configuration.decisions),
        limits=Limits(max_num_reqs=settings.max_num_seqs, max_num_tokens=settings.max_num_batched_tokens),
        speculative=speculative,
        drafts=_drafts(settings, speculative),
        lora=_lora(settings),
        parallel=Parallel(data=ranks.data, tensor=ranks.tensor, decode_context=ranks.decode_context),
        by_flags=_by_flags(configuration),
        assumptions=(
            *RELEASES.assumptions(_unused(settings, configuration)),
            *_assumptions(configuration),
            *_kernels(settings, configuration),
        ),
    )


def _unused(settings: VllmSettings, configuration: Configuration) -> set[str]:
    """Return the parts of vLLM's code, as the table of releases names them, that decide nothing of the answer."""
    used = {
        "model runner V2's graphs": settings.runner is RunnerVersion.V2,
        "model runner V1's graphs": settings.runner is RunnerVersion.V1,
        "speculation": configuration.spec is not None,
        "drafters' graphs": configuration.spec is not None,
        "agreement of data-parallel ranks": configuration.data > 1,
    }
    return {part for part, present in used.items() if not present}


def _kernels(settings: VllmSettings, configuration: Configuration) -> Iterator[str]:
    """Yield that full graphs of verifications rest on FlashInfer's cubins, from Hopper on (utils/flashinfer.py)."""
    wide = settings.num_speculative_tokens > 0 and settings.mode.decode_mode is GraphMode.FULL
    if wide and settings.backend == "FLASHINFER" and configuration.environment.device.sm >= (9, 0):
        says = "FlashInfer's decode kernel for several tokens of a request is assumed to be here: it needs its cubins"
        without = "without them vLLM captures no full graph of a verification"
        yield f"{says}; {without}; install flashinfer-cubin, or let the server reach NVIDIA's archive of kernels"


def _by_flags(configuration: Configuration) -> str:
    """Return why flags alone decide the answer; empty where the model is emulated, or taken for a dense decoder."""
    model = configuration.model
    if configuration.other_device:
        return checkpoints.other_device(configuration.other_device, configuration.environment.name)
    if model.odd is None:
        return ""
    place = f", which {REGISTERED} decides" if model.known else ", and is unknown here"
    return f"{model.name} has {model.odd}{place}"


def _assumptions(configuration: Configuration) -> Iterator[str]:
    """Yield the assumptions about the target and the draft model, where no config.json is found."""
    target, spec = configuration.model, configuration.spec
    if target.odd is not None:
        fetch = not target.known and not configuration.other_device
        yield checkpoints.by_flags(_by_flags(configuration), checkpoints.remedy(target.name) if fetch else OBSERVE)
        return
    results = "cudagraph_mode, capture sizes, attention_backend"
    results += "" if configuration.length_given else ", max_model_len"
    yield from _assumption(target, COUNTS_AS, results)
    if spec is not None and spec.has_draft_cache and spec.model is not target:
        results = "the drafter's attention backend, and with it modes and draft chains,"
        yield from _assumption(spec.model, "a dense decoder with the target's length", results)


def _assumption(model: ModelFacts, counts_as: str, results: str) -> Iterator[str]:
    """Yield what is assumed of a model; nothing where its own facts are here."""
    yield from checkpoints.assumed(model.source, model.name, model.like, counts_as, results)
    if not model.heads and model.source == KNOWN:
        says = f"the attention heads of {model.name} are not known here, and count as of size {model.head_size}"
        yield f"{says}; attention_backend and the modes that it leaves rest on that; {checkpoints.remedy(model.name)}"


def _speculative(settings: VllmSettings) -> Speculative | None:
    if not settings.num_speculative_tokens:
        return None
    # Only the width of decodes matters here, so n-gram and the others may go by any method's name.
    method = _METHODS.get(settings.method or "", Method.EAGLE)
    schedule = tuple(sorted(settings.schedule or ()))
    try:
        return Speculative(method=method, num_tokens=settings.num_speculative_tokens, schedule=schedule)
    except InvalidValue as error:
        reason = f"vLLM accepts it, but this much is not emulated: {'; '.join(map(str, error.problems))}"
        remedy = "draft fewer tokens, or give fewer ranges"
        raise not_emulated("--speculative-config", "", remedy, reason=reason) from error


def _drafts(settings: VllmSettings, speculative: Speculative | None) -> tuple[DecodeFamily, ...] | None:
    """Return the passes of a parallel drafter, wherever the schedule drafts anything; None for the others."""
    if not settings.draft_query_len or speculative is None:
        return None
    tokens, tiers = settings.max_num_batched_tokens, speculative.tiers(settings.max_num_seqs)
    # A batch that drafts k tokens verifies 1 + k of each request, and the token budget holds no more.
    ends = ((first, min(last, tokens // (1 + k))) for first, last, k in tiers if k)
    requests = Domain(tuple((first, last) for first, last in ends if first <= last))
    return (DecodeFamily(query_len=settings.draft_query_len, draft_steps=None, requests=requests),)


def _lora(settings: VllmSettings) -> Lora | None:
    if not settings.max_loras:
        return None
    # A graph for a single adapter exists only where every power of two has one.
    return Lora(max_active=settings.max_loras, specialize=1 in settings.lora_cases)


def _shown(settings: VllmSettings, configuration: Configuration) -> tuple[Setting, ...]:
    """Return the settings to show, each with its source: a flag, the file, the model, or a rule."""
    line, sources, model = configuration.line, configuration.sources, configuration.model
    counts_as = "a dense decoder" if model.odd is None else "none"

    def by_flag(name: str, value: Any) -> tuple[Any, str]:
        return value, line.source(name)

    values: dict[str, tuple[Any, str]] = {
        "model": (model.name, line.source("model") if line.model is None else "flag"),
        "model_facts": (checkpoints.says(model.source, counts_as, model.like), model.source),
        "model_runner": (settings.runner.value, "default"),
        "max_num_seqs": (settings.max_num_seqs, sources["max_num_seqs"]),
        "max_num_batched_tokens": (settings.max_num_batched_tokens, sources["max_num_batched_tokens"]),
        "max_model_len": (settings.max_model_len, sources["max_model_len"]),
        "requested_cudagraph_mode": (settings.requested_mode.value, sources["requested_mode"]),
        "cudagraph_mode": (settings.mode.value, sources["cudagraph_mode"]),
        "cudagraph_capture_sizes": (list(settings.sizes), sources["cudagraph_capture_sizes"]),
        "max_cudagraph_capture_size": (settings.max_size, sources["max_cudagraph_capture_size"]),
        "compilation_mode": (settings.compilation, sources["compilation_mode"]),
        "dtype": by_flag("dtype", configuration.dtype),
        "kv_cache_dtype": by_flag("kv_cache_dtype", configuration.cache),
        "attention_backend": (settings.backend, _backend_source(configuration)),
        "async_scheduling": by_flag("async_scheduling", settings.async_scheduling),
        "data_parallel_size": by_flag("data_parallel_size", configuration.data),
        "tensor_parallel_size": by_flag("tensor_parallel_size", configuration.tensor),
    }
    if settings.method is not None:
        schedule = None if settings.schedule is None else [list(entry) for entry in settings.schedule]
        values |= {
            "speculative_method": by_flag("speculative_config", settings.method),
            "num_speculative_tokens": by_flag("speculative_config", settings.num_speculative_tokens),
            "num_speculative_tokens_per_batch_size": by_flag("speculative_config", schedule),
            "decode_query_lens": (list(settings.decode_query_lens), "default"),
            "adaptive_verification": by_flag("speculative_config", settings.varlen),
        }
    spec = configuration.spec
    if spec is not None and spec.has_draft_cache and spec.model is not model:
        facts = checkpoints.says(spec.model.source, "a dense decoder", spec.model.like)
        values["draft_model_facts"] = (facts, spec.model.source)
    values |= dict(shown_families(settings, configuration))
    if settings.max_loras:
        values["max_loras"] = by_flag("max_loras", settings.max_loras)
        values["lora_cases"] = by_flag("specialize_active_lora", list(settings.lora_cases))
    others = sorted(name for name in line.values if f"--{name.replace('_', '-')}" not in FLAGS)
    others += sorted(name for name in line.variables if name not in FLAGS)
    values["not_relevant"] = (others, "flag" if others else "default")
    return tuple(Setting(name=name, value=value, source=source) for name, (value, source) in values.items())


def _backend_source(configuration: Configuration) -> str:
    """Return the source of the flag that names the backend, or of the model facts that chose it."""
    line = configuration.line
    if configuration.backend is None:
        return configuration.model.source
    return line.source("attention_backend" if "attention_backend" in line.values else "attention_config")


_NEWEST = Engine(
    name="vllm",
    version=NEWEST,
    emulate=emulate,
    export=export_vllm,
    launch=launch_vllm,
    flags={**FLAGS, OTHER_DEVICE: "what says that the device is not NVIDIA's, as an image's name: flags alone answer"},
    programs=(
        "vllm serve",
        "python -m vllm.entrypoints.cli.main serve",
        "python -m vllm.entrypoints.openai.api_server",
        "python -m vllm.entrypoints.api_server",
        "python -m dynamo.vllm",
        "serve",
    ),
    wrappers={
        "python -m dynamo.vllm": {**DYNAMO, "--disaggregation-mode": 1, "--use-vllm-tokenizer": 0, "--connector": 1}
    },
    limits=("--max-num-seqs", "--max-num-batched-tokens", "--speculative-config"),
    backends=(*BACKENDS.items(), *LATENT_BACKENDS.items()),
    unemulated_variables=rules()["unemulated_variables"],
    history=HISTORY,
    logs=LOGS,
    fixes=VllmFixes(),
    sizes_in_tokens=True,
)
ENGINE = RELEASES.engine(_NEWEST)
