"""vLLM 0.33: what it captures and how it dispatches, from the words behind ``vllm serve``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from capture_planner.engines import checkpoints
from capture_planner.engines.emulation import Emulation, Setting
from capture_planner.engines.engine import Engine
from capture_planner.engines.yaml_files import in_its_file
from capture_planner.errors import FlagError, InvalidValue
from capture_planner.modes import GraphMode
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner.records.batch_space import DecodeFamily, Domain
from capture_planner.records.environment import Environment
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Limits, Lora, Parallel
from capture_planner_vllm.config import Configuration
from capture_planner_vllm.export import export_vllm
from capture_planner_vllm.fixes import VllmFixes
from capture_planner_vllm.flags import VARIABLES, Given, read, refusal
from capture_planner_vllm.managers import managers
from capture_planner_vllm.model import COUNTS_AS
from capture_planner_vllm.places import name_of
from capture_planner_vllm.resolved import resolved
from capture_planner_vllm.settings import VllmSettings
from capture_planner_vllm.unemulated import not_emulated

VERSION = "0.33.0"
FLAGS = {
    "--max-num-seqs": "most requests in one batch",
    "--max-num-batched-tokens": "most tokens in one batch; 8k and 8K are read",
    "--max-model-len": "longest sequence; auto, 8k and 8K are read",
    "--speculative-config": "the drafter, as JSON or in dotted parts; -sc",
    "--compilation-config": "mode, sizes and more, as JSON or in dotted parts; -cc",
    "--optimization-level": "0 to 3: NONE, PIECEWISE, FULL_AND_PIECEWISE twice; -O2",
    "--cudagraph-capture-sizes": "capture sizes, in tokens",
    "--max-cudagraph-capture-size": "largest capture size, in tokens",
    "--enforce-eager": "no graphs",
    "--performance-mode": "balanced, interactivity or throughput",
    "--enable-lora": "graphs for batches with adapters",
    "--max-loras": "most adapters in one batch",
    "--specialize-active-lora": "graphs for each power of two of adapters",
    "--data-parallel-size": "ranks with batches of their own; -dp",
    "--tensor-parallel-size": "ranks that share a batch; -tp",
    "--pipeline-parallel-size": "stages of the model; -pp",
    "--decode-context-parallel-size": "ranks that split the KV cache; -dcp",
    "--enable-expert-parallel": "experts are spread over ranks; -ep",
    "--all2all-backend": "how experts exchange tokens; some are not captured",
    "--enable-dbo": "dual batch overlap; on several data-parallel ranks it is not emulated",
    "--ubatch-size": "the same with more parts",
    "--dbo-decode-token-threshold": "fewest tokens of decodes that are split",
    "--dbo-prefill-token-threshold": "fewest tokens of other batches that are split",
    "--dtype": "of weights and activations; float32 rules out most backends",
    "--quantization": "of the weights; some machines and dtypes lack it; -q",
    "--kv-cache-dtype": "of the KV cache; it decides which attention backends there are",
    "--block-size": "tokens of a KV block; some backends take few sizes",
    "--enable-prefix-caching": "recurrent layers need chunked prefill for it; --no- forbids it",
    "--mamba-block-size": "tokens between kept states of recurrent layers",
    "--attention-backend": "the attention backend; its support decides the mode",
    "--attention-config": "backend, flash_attn_version, use_trtllm_attention; -ac",
    "--kv-transfer-config": "a KV connector; some need PIECEWISE",
    "--async-scheduling": "schedule the next step early",
    "--enable-chunked-prefill": "split long prompts; --no- forbids it",
    "--runner": "pooling models have no FULL graphs",
    "--convert": "embed and classify make a pooling model",
    "--config": "a YAML file of flags",
    "--model": "the model, also as the first word: a folder with config.json, or a name",
    **VARIABLES,
}
_METHODS = {
    "eagle": Method.EAGLE,
    "eagle3": Method.EAGLE3,
    "mtp": Method.MTP,
}


def resolve(command: Sequence[str], environment: Environment) -> tuple[VllmSettings, Configuration]:
    """Return the settings and the run that led to them; raises ``FlagError`` as vLLM would refuse the flags."""
    configuration = Configuration(read(command), environment)
    return resolved(configuration), configuration


def emulate(command: Sequence[str], environment: Environment) -> Emulation:
    """Return what vLLM does with the words behind ``vllm serve`` on a machine; raises ``FlagError``."""
    try:
        settings, configuration = resolve(command, environment)
    except FlagError as error:
        raise in_its_file(error, command, name_of) from None
    if settings.sizes and settings.sizes[0] < 1 and settings.mode is not GraphMode.NONE:
        raise refusal(
            "--cudagraph-capture-sizes",
            f"vLLM starts with it and fails when it captures: a graph of {settings.sizes[0]} tokens",
            "give sizes from 1 on",
        )
    if configuration.ubatching and settings.data_parallel_size > 1 and settings.mode is not GraphMode.NONE:
        what = "data-parallel ranks that split a batch have a graph of both halves too"
        raise not_emulated("--enable-dbo", what, "leave it out, or emulate one rank")
    speculative = _speculative(settings)
    return Emulation(
        engine="vllm",
        version=VERSION,
        command=tuple(command),
        settings=_shown(settings, configuration),
        sizes=settings.sizes,
        asked_sizes=configuration.listed_sizes,
        managers=managers(settings),
        decisions=tuple(configuration.decisions),
        limits=Limits(max_num_reqs=settings.max_num_seqs, max_num_tokens=settings.max_num_batched_tokens),
        speculative=speculative,
        drafts=_drafts(settings, speculative),
        lora=_lora(settings),
        parallel=Parallel(
            data=settings.data_parallel_size,
            tensor=settings.tensor_parallel_size,
            decode_context=configuration.decode_context,
        ),
        notes=tuple(_notes(configuration)),
    )


def _notes(configuration: Configuration) -> Iterator[str]:
    """Yield what is assumed of the target and of its draft model, where their facts are not here."""
    target, spec = configuration.model, configuration.spec
    if not target.known:
        given = configuration.given.get("max_model_len") not in (None, -1)
        rest = "attention_backend" if given else "max_model_len, attention_backend"
        yield checkpoints.note(
            target.name, COUNTS_AS, f"{rest} and the modes that the backend leaves rest on it"
        )
    if spec is not None and spec.has_draft_cache and spec.model is not target and not spec.model.known:
        rest = "the drafter's attention backend, and with it modes and draft chains, rests on it"
        yield checkpoints.note(spec.model.name, "a dense decoder with the target's length", rest)


def _speculative(settings: VllmSettings) -> Speculative | None:
    if not settings.num_speculative_tokens:
        return None
    # Nothing asks an emulation for its method: n-gram and the others count for the width of their decodes.
    method = _METHODS.get(settings.method or "", Method.EAGLE)
    schedule = tuple(sorted(settings.schedule or ()))
    try:
        return Speculative(method=method, num_tokens=settings.num_speculative_tokens, schedule=schedule)
    except InvalidValue as error:
        reason = f"vLLM takes it, and it is more than is emulated: {error}"
        remedy = "draft fewer tokens, or give fewer ranges"
        raise not_emulated("--speculative-config", "", remedy, reason=reason) from error


def _drafts(settings: VllmSettings, speculative: Speculative | None) -> tuple[DecodeFamily, ...] | None:
    """Return the passes of a drafter that makes all drafts in one, wherever anything is drafted."""
    if not settings.draft_query_len or speculative is None:
        return None
    tokens, tiers = settings.max_num_batched_tokens, speculative.tiers(settings.max_num_seqs)
    ends = ((first, min(last, tokens // (1 + k))) for first, last, k in tiers if k)
    requests = Domain(tuple((first, last) for first, last in ends if first <= last))
    return (DecodeFamily(query_len=settings.draft_query_len, draft_steps=None, requests=requests),)


def _lora(settings: VllmSettings) -> Lora | None:
    if not settings.max_loras:
        return None
    # A graph for one adapter alone is there only where each power of two has one.
    return Lora(max_active=settings.max_loras, specialize=1 in settings.lora_cases)


def _shown(settings: VllmSettings, configuration: Configuration) -> tuple[Setting, ...]:
    given: Given = configuration.given
    rules = configuration.sources
    values: dict[str, tuple[Any, str]] = {
        "model": (configuration.model.name, given.source("model") if given.model is None else "flag"),
        "model_facts": (
            checkpoints.says(configuration.model.source, "a dense decoder"),
            configuration.model.source,
        ),
        "model_runner": (settings.runner.value, "default"),
        "max_num_seqs": (settings.max_num_seqs, rules["max_num_seqs"]),
        "max_num_batched_tokens": (settings.max_num_batched_tokens, rules["max_num_batched_tokens"]),
        "max_model_len": (settings.max_model_len, rules["max_model_len"]),
        "requested_cudagraph_mode": (settings.requested_mode.value, rules["requested_mode"]),
        "cudagraph_mode": (settings.mode.value, rules["cudagraph_mode"]),
        "cudagraph_capture_sizes": (list(settings.sizes), rules["cudagraph_capture_sizes"]),
        "max_cudagraph_capture_size": (settings.max_size, rules["max_cudagraph_capture_size"]),
        "compilation_mode": (settings.compilation, rules["compilation_mode"]),
        "dtype": (configuration.dtype, given.source("dtype")),
        "kv_cache_dtype": (configuration.cache, given.source("kv_cache_dtype")),
        "attention_backend": (settings.backend, _backend_source(configuration)),
        "async_scheduling": (settings.async_scheduling, given.source("async_scheduling")),
        "data_parallel_size": (settings.data_parallel_size, given.source("data_parallel_size")),
        "tensor_parallel_size": (settings.tensor_parallel_size, given.source("tensor_parallel_size")),
    }
    if settings.method is not None:
        schedule = None if settings.schedule is None else [list(entry) for entry in settings.schedule]
        source = given.source("speculative_config")
        values |= {
            "speculative_method": (settings.method, source),
            "num_speculative_tokens": (settings.num_speculative_tokens, source),
            "num_speculative_tokens_per_batch_size": (schedule, source),
            "decode_query_lens": (list(settings.decode_query_lens), "default"),
            "adaptive_verification": (settings.varlen, source),
        }
    if settings.max_loras:
        values |= {
            "max_loras": (settings.max_loras, given.source("max_loras")),
            "lora_cases": (list(settings.lora_cases), given.source("specialize_active_lora")),
        }
    others = sorted(name for name in given.values if f"--{name.replace('_', '-')}" not in FLAGS)
    others += sorted(name for name in given.variables if name not in VARIABLES)
    values["not_relevant"] = (others, "flag" if others else "default")
    return tuple(Setting(name=name, value=value, source=source) for name, (value, source) in values.items())


def _backend_source(configuration: Configuration) -> str:
    """Return the flag that names the backend, or else where the facts come from that chose it."""
    if configuration.backend is None:
        return configuration.model.source
    given = configuration.given
    return given.source("attention_backend" if "attention_backend" in given.values else "attention_config")


ENGINE = Engine(
    name="vllm",
    version=VERSION,
    emulate=emulate,
    export=export_vllm,
    flags=FLAGS,
    programs=("vllm serve", "serve", "python -m vllm.entrypoints.openai.api_server"),
    limits=("--max-num-seqs", "--max-num-batched-tokens", "--speculative-config"),
    variables="VLLM_",
    fixes=VllmFixes(),
    sizes_in_tokens=True,
)


@hookimpl
def capture_planner_engines() -> Iterable[Engine]:
    """Return the one engine of this distribution."""
    return (ENGINE,)
