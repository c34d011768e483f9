"""The options that a command line asks for, checked one by one: graphs, model, ranks, budgets, adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from capture_planner.engines.emulation import Decisions
from capture_planner.engines.parsing import refusal
from capture_planner.modes import GraphMode
from capture_planner.planning.sizing.engine_lists import GiB
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner_vllm.emulation.attention import BACKEND, backend_name
from capture_planner_vllm.emulation.encoder_budgets import EncoderOptions
from capture_planner_vllm.emulation.flags import CommandLine
from capture_planner_vllm.emulation.model import DEFAULT_MODEL, overrides, read_target
from capture_planner_vllm.emulation.overlap import Overlap
from capture_planner_vllm.emulation.parts import ALL_MODES, COMPILE, Part, whole_number
from capture_planner_vllm.emulation.precision import cache_dtype, check_quantization, model_dtype
from capture_planner_vllm.emulation.releases import has, tabled
from capture_planner_vllm.emulation.speculation import speculation
from capture_planner_vllm.emulation.speculators import with_its_draft
from capture_planner_vllm.emulation.tables import names
from capture_planner_vllm.emulation.unemulated import check_emulated, sign_of_other_device

COMPILATION = "--compilation-config"
_BUDGETS = {"180 GiB": [16384, 1024]}
"""Tokens and requests of the largest devices, as the table of releases has them."""


class ServeOptions:
    """The options of one command line; its attributes are what vLLM's configuration objects start with.

    Raises ``FlagError`` where vLLM rejects them, ``NotEmulated`` where it accepts something unknown here.
    Flags and JSON parts that have no effect on graphs are accepted whatever their value.
    """

    user_sizes: list[int] | None
    user_max: int | None
    user_mode: GraphMode | None
    splitting: list[str] | None
    backend: str | None

    def __init__(self, line: CommandLine, environment: Environment) -> None:
        self.decisions = Decisions()
        self.note = self.decisions.note
        served, line = line.model, with_its_draft(line)
        self.line, self.environment = line, environment
        if line.model != served:
            self.note(
                "speculators", served, line.model, f"{served} is a drafter, and vLLM serves the target that it names"
            )
        self.sources: dict[str, str] = {}
        if environment.device.kind is not DeviceKind.CUDA:
            raise refusal("--environment", f"{environment.name} has no CUDA device", "name the environment of a GPU")
        self._graphs()
        self._model()
        self._parallel()
        self.spec = speculation(line, self.model, self.tensor, self.max_model_len)
        self._budgets()
        self._adapters()

    def _graphs(self) -> None:
        line = self.line
        for value in line.every("compilation_config"):  # the last one counts, and all are checked: nothing is merged
            self._compilation_parts(value)
        self.user_sizes = self._once("cudagraph_capture_sizes", self.user_sizes)
        self.user_max = self._once("max_cudagraph_capture_size", self.user_max)
        self.listed_sizes = tuple(self.user_sizes or ())
        for value in line.every("attention_config"):
            self._attention_parts(value)
        backend = line.get("attention_backend")
        if backend is not None and self.backend is not None:
            raise refusal(BACKEND, "--attention-config gives a backend too", "drop one of both")
        if backend is not None:
            self.backend = backend_name(BACKEND, backend)
        level = line.get("optimization_level", "2")
        self.level = whole_number(level)
        if self.level not in (0, 1, 2, 3):
            raise refusal("--optimization-level", f"vLLM has no level {level}", "give 0, 1, 2 or 3")
        self.performance = line.get("performance_mode", "balanced")
        self.eager = bool(line.get("enforce_eager", False))

    def _once(self, name: str, inside: Any) -> Any:
        """Return an option that may be a flag or a part of ``--compilation-config``, but not both."""
        value = self.line.get(name)
        if value is not None and inside is not None:
            raise refusal(f"--{name.replace('_', '-')}", f"{COMPILATION} gives {name} too", "drop one of both")
        self.sources[name] = self.line.source(name if name in self.line.values else "compilation_config")
        return inside if value is None else value

    def _compilation_parts(self, value: Mapping[str, Any] | None) -> None:
        cc = Part(COMPILATION, "compilation_config", value)
        mode = cc.one_of("cudagraph_mode", ALL_MODES, 3)
        self.user_mode = None if mode is None else GraphMode(mode)
        self.encoder = EncoderOptions.of(cc)
        compilation = cc.one_of("mode", COMPILE, 4)
        self.compile = None if compilation is None else COMPILE.index(compilation)
        self.user_sizes = cc.integers("cudagraph_capture_sizes")
        self.user_max = cc.integer("max_cudagraph_capture_size")
        self.splitting = cc.given.get("splitting_ops")
        operators = [] if self.splitting is None else self.splitting
        if not isinstance(operators, list) or not all(isinstance(name, str) for name in operators):
            raise cc.refuse("splitting_ops", f"expected a list of operators, got {operators!r}", "as in []")
        self.partition = bool(cc.boolean("use_inductor_graph_partition"))
        self.separate_lora = bool(cc.boolean("cudagraph_specialize_lora", True))
        self.compiler = cc.text("backend") or "inductor"
        if self.compile == 3 and self.compiler not in ("eager", "inductor"):
            message = f"piecewise compilation has no backend {self.compiler}"
            raise cc.refuse("backend", message, "give eager or inductor")
        passes = cc.given.get("pass_config")
        if passes is not None and not isinstance(passes, dict):
            raise cc.refuse("pass_config", f"expected a JSON object, got {passes!r}", "as in {}")
        self.fuse_attention = bool(Part(COMPILATION, "pass_config", passes).boolean("fuse_attn_quant"))

    def _attention_parts(self, value: Mapping[str, Any] | None) -> None:
        ac = Part("--attention-config", "attention_config", value)
        self.backend = backend_name("--attention-config", ac.text("backend"))
        self.flash_attn = ac.integer("flash_attn_version")
        version = ac.given.get("flash_attn_version")
        if self.flash_attn not in (None, 2, 3, 4) or isinstance(version, str):
            raise ac.refuse("flash_attn_version", f"vLLM has no version {version!r}", "give 2, 3 or 4")
        self.trtllm = ac.boolean("use_trtllm_attention")

    def _model(self) -> None:
        line = self.line
        self.model = read_target(line.model or DEFAULT_MODEL, overrides(line.get("hf_overrides")))
        self.other_device = sign_of_other_device(line, self.backend)
        if self.other_device:
            self.model = attrs.evolve(self.model, odd=self.model.odd or "a device of its own")
        check_emulated(line, self.model)
        length = line.get("max_model_len")
        self.length_given = length not in (None, -1)
        is_bound = self.model.exact and line.variables.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1"
        longest = self.model.limit if is_bound else length
        if self.length_given and not 0 < length <= longest:
            message = f"vLLM accepts 1 to {max(longest, 1)} tokens for this model, got {length}"
            raise refusal("--max-model-len", message, "give a length in this range, or auto")
        self.max_model_len = length if self.length_given else self.model.max_len
        self.sources["max_model_len"] = self.model.source if length is None else line.source("max_model_len")
        runner, converts = line.get("runner", "auto"), line.get("convert") in ("embed", "classify")
        self.pooling = runner == "pooling" or (runner == "auto" and converts)
        self.dtype = model_dtype(line, self.model, self.environment.device.sm, pooling=self.pooling)
        if not self.other_device:
            check_quantization(line, self.model, self.dtype, self.environment.device.sm)
        self.cache = cache_dtype(line, self.model, self.dtype)
        blackwell = self.environment.device.sm[0] == 10
        if (self.model.architecture, self.cache, blackwell) == ("GlmMoeDsaForCausalLM", "auto", True):
            self.cache = "fp8_e4m3"
            self.note("kv-cache", "auto", self.cache, "for this model on Blackwell vLLM takes an fp8 KV cache")
        self.block: int | None = line.get("block_size")
        if self.block is not None:
            _check_positive("--block-size", self.block)

    def _parallel(self) -> None:
        get, model = self.line.get, self.model
        self.tensor, self.data = get("tensor_parallel_size", 1), get("data_parallel_size", 1)
        self.pipeline = get("pipeline_parallel_size", 1)
        self.decode_context = get("decode_context_parallel_size", 1)
        self.expert = bool(get("enable_expert_parallel", False))
        self.all2all = get("all2all_backend", "allgather_reducescatter")
        self.overlap = self._overlap()
        self.ubatching = self.overlap is not None
        self.connector: Mapping[str, Any] = get("kv_transfer_config") or {}
        for name in ("tensor", "data", "pipeline", "decode_context"):
            _check_positive(f"--{name.replace('_', '-')}-parallel-size", getattr(self, name))
        if model.heads % self.tensor:  # heads that are not known are 0, and pass
            message = f"{model.heads} attention heads cannot be split over {self.tensor} ranks"
            raise refusal("--tensor-parallel-size", message, "give a divisor")
        if self.pipeline > 1 and model.architecture in names()["no_pipeline"]:
            raise refusal("--pipeline-parallel-size", "vLLM does not pipeline this model", "give 1")
        if self.expert and model.exact and not model.experts:
            raise refusal("--enable-expert-parallel", "the model has no experts", "leave it out")
        if self.tensor % self.decode_context:
            message = f"the {self.tensor} tensor-parallel ranks are not a multiple of {self.decode_context}"
            raise refusal("--decode-context-parallel-size", message, "give a divisor")
        if self.decode_context > 1 and model.exact and not model.mla:
            # Ranks share the sequence of a KV head that each of them holds.
            copies = self.tensor // model.kv_heads if self.tensor > model.kv_heads else 0
            if self.decode_context > copies or model.heads // model.kv_heads % self.decode_context:
                message = f"vLLM cannot split {model.kv_heads} KV heads on {self.tensor} ranks this way"
                raise refusal("--decode-context-parallel-size", message, "use more tensor-parallel ranks, or give 1")

    def _overlap(self) -> Overlap | None:
        """Return how batches are split into microbatches, where the flags ask for that."""
        get, size = self.line.get, self.line.get("ubatch_size", 0)
        found = Overlap(
            microbatches=2 if get("enable_dbo", False) else size,
            decode_tokens=get("dbo_decode_token_threshold", 32),
            prefill_tokens=get("dbo_prefill_token_threshold", 512),
        )
        flags = ("--ubatch-size", "--dbo-decode-token-threshold", "--dbo-prefill-token-threshold")
        for flag, value in zip(flags, (size, found.decode_tokens, found.prefill_tokens), strict=True):
            if value < 0:
                raise refusal(flag, f"vLLM requires at least 0, got {value}", "leave it out")
        if found.microbatches < 2:
            return None
        for flag, value in zip(flags[1:], (found.decode_tokens, found.prefill_tokens), strict=True):
            if value < found.microbatches:
                message = f"vLLM requires a token for each of {found.microbatches} microbatches, got {value}"
                raise refusal(flag, message, f"give {found.microbatches} or more")
        return found

    def _batch_defaults(self) -> tuple[int, int]:
        """Return the tokens and requests that ``vllm serve`` starts from on this device."""
        device = self.environment.device
        # GB10 has the memory of a large GPU, not its compute (engine/arg_utils.py).
        small = device.sm == (12, 1) and has("gb10-budgets")
        # Before 0.28 the largest devices had the budgets of those of 80 GiB.
        if device.memory >= 160 * GiB and tabled("budgets", _BUDGETS)["180 GiB"] == _BUDGETS["180 GiB"]:
            return 16384, 1024
        # Large budgets slow an A100 down, whatever its memory (vllm#17885).
        if device.memory >= 70 * GiB and "a100" not in device.name.lower() and not small:
            return 8192, 1024
        return 2048, 256

    def _budgets(self) -> None:
        line = self.line
        tokens, seqs = self._batch_defaults()
        # Experts that run batches of all ranks have a budget of their own (use_batched_dp_moe).
        if self.all2all in ("deepep_low_latency", "nixl_ep") and self.expert and self.data > 1:
            tokens = 256
        if self.performance == "throughput":
            tokens, seqs = 2 * tokens, 2 * seqs
        user_tokens, user_seqs = line.get("max_num_batched_tokens"), line.get("max_num_seqs")
        seqs = seqs if user_seqs is None else user_seqs
        chunked = line.get("enable_chunked_prefill")
        chunked = not self.model.encoder_decoder if chunked is None else chunked
        if not chunked and self.model.recurrent and line.get("enable_prefix_caching", True):
            message = "without it vLLM cannot cache prefixes of recurrent layers"
            raise refusal("--enable-chunked-prefill", message, "give --no-enable-prefix-caching too")
        if not chunked:  # a whole prompt has to fit into one step
            tokens = max(tokens, self.max_model_len)
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            self.sources[name] = line.source(name)
        if user_tokens is not None:
            tokens = user_tokens
        elif tokens > seqs * self.max_model_len:
            most, rule = seqs * self.max_model_len, "tokens-by-requests"
            self.note(rule, tokens, most, f"{seqs} requests of {self.max_model_len} tokens have {most}")
            self.sources["max_num_batched_tokens"], tokens = rule, most
        if user_seqs is None and seqs > tokens:
            self.note("requests-by-tokens", seqs, tokens, f"a batch of {tokens} tokens has at most {tokens} requests")
            self.sources["max_num_seqs"], seqs = "requests-by-tokens", tokens
        self.tokens, self.seqs = tokens, seqs
        _check_positive("--max-num-seqs", seqs)
        _check_positive("--max-num-batched-tokens", tokens)
        if tokens < self.max_model_len and (not chunked or self.model.encoder_decoder):
            # A length that no flag gives is the model's, which may be assumed.
            error = refusal if self.length_given else self.model.refusal
            message = f"{tokens} tokens do not hold a prompt of {self.max_model_len} that is not chunked"
            remedy = "give more tokens, a smaller --max-model-len, or keep chunked prefill"
            raise error("--max-num-batched-tokens", message, remedy)
        if tokens < seqs:
            message = f"vLLM requires a token for each of {seqs} requests, got {tokens}"
            raise refusal("--max-num-batched-tokens", message, f"give {seqs} or more, or fewer --max-num-seqs")

    def _adapters(self) -> None:
        get = self.line.get
        enabled = bool(get("enable_lora", False))
        self.max_loras: int = get("max_loras", 1) if enabled else 0
        self.specialize = enabled and bool(get("specialize_active_lora", False))
        if not enabled:
            return
        if self.model.architecture in names()["no_lora"]:
            raise refusal("--enable-lora", "vLLM has no adapters for this model", "leave it out")
        _check_positive("--max-loras", self.max_loras)
        least = self.seqs * (1 + (self.spec.tokens if self.spec is not None else 0))
        if self.tokens < least:
            message = f"with adapters vLLM requires 1 + K tokens for each of {self.seqs} requests, got {self.tokens}"
            raise refusal("--max-num-batched-tokens", message, f"give {least} or more, or fewer draft tokens")


def _check_positive(flag: str, value: int) -> None:
    if value < 1:
        raise refusal(flag, f"vLLM requires at least 1, got {value}", "give 1 or more")
