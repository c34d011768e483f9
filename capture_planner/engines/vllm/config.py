"""vLLM's configuration, from given flags to its settings: defaults, checks and rewrites in vLLM's order."""

from __future__ import annotations

from typing import Any

import attrs

from capture_planner.engines.vllm.flags import Given, refusal
from capture_planner.engines.vllm.model import DEFAULT_MODEL, Model, read_model
from capture_planner.engines.vllm.parts import ALL_MODES, COMPILE, Part, names
from capture_planner.engines.vllm.resolution import FLAG as BACKEND_FLAG
from capture_planner.engines.vllm.resolution import Attention, Ladder, backend_name
from capture_planner.engines.vllm.settings import Drafter, Runner, VllmSettings
from capture_planner.engines.vllm.speculation import FLAG as SPECULATIVE
from capture_planner.engines.vllm.speculation import check_schedule, speculation
from capture_planner.environment import DeviceKind, Environment
from capture_planner.modes import GraphMode, Role
from capture_planner.plan import Decision
from capture_planner.sizing.engines import vllm_tokens

GiB = 1 << 30
COMPILATION = "--compilation-config"
_LEVELS = {0: "NONE", 1: "PIECEWISE", 2: "FULL_AND_PIECEWISE", 3: "FULL_AND_PIECEWISE"}
_DYNAMIC_ON_V1 = ("ngram", "eagle", "eagle3", "mtp", "draft_model", "dflash")
_ASYNC_ON_V1 = ("eagle", "eagle3", "mtp", "ngram_gpu", "draft_model")
_MICROBATCHING = ("deepep_low_latency", "deepep_high_throughput", "nixl_ep")


class Configuration:
    """One run through vLLM's configuration; its attributes are what vLLM's own objects hold at each step."""

    def __init__(self, given: Given, environment: Environment) -> None:
        self.given, self.environment = given, environment
        self.decisions: list[Decision] = []
        self.sources: dict[str, str] = {}
        if environment.device.kind is not DeviceKind.CUDA:
            raise refusal("--environment", f"{environment.name} has no CUDA device", "name a GPU's environment")
        self._parts()
        self._model()
        self._parallel()
        self.spec = speculation(given, self.model, self.tensor, self.max_model_len)
        self._budgets()
        self._adapters()
        self._runner()
        self._compilation()
        self._schedule()
        self._limit_modes()
        self._sizes()
        self._last_rewrites()
        self._load_draft()

    def _load_draft(self) -> None:
        """Go through the checks once more where loading the draft makes vLLM do so.

        Loading a draft with a backend of its own copies the configuration, and the copy shares its graph
        settings: modes and sizes are rewritten once more, starting from what the first time left.
        """
        spec = self.spec
        if spec is None or not spec.has_draft_cache:
            return
        if self.runner is Runner.V2 and spec.method != "draft_model" and not spec.overrides:
            return
        self.asked_sizes, self.asked_max = list(self.sizes), self.max_size
        if self.schedule is not None and self.runner is Runner.V1 and GraphMode.FULL in self.mode.allowed:
            self._set_mode("schedule-v1", GraphMode.PIECEWISE, "the V1 runner captures no FULL graphs by schedule")
        self._limit_modes()
        self._sizes()
        self._last_rewrites()

    def note(
        self, rule: str, before: object, after: object, says: str, role: Role = Role.TARGET, backend: str | None = None
    ) -> None:
        """Write down a step that changed a value."""
        self.decisions.append(
            Decision(rule=rule, before=str(before), after=str(after), role=role, backend=backend, says=says)
        )

    def _set_mode(self, rule: str, mode: GraphMode, says: str) -> None:
        if mode is not self.mode:
            self.note(rule, self.mode.value, mode.value, f"{says}: {self.mode.value} becomes {mode.value}")
            self.sources["cudagraph_mode"] = rule
            self.mode = mode

    def _no_sizes(self) -> None:
        self.sizes, self.max_size = (), 0

    # What is given -------------------------------------------------------------------------------

    def _parts(self) -> None:
        given = self.given
        cc = Part(COMPILATION, "compilation_config", given.get("compilation_config"))
        requested = cc.one_of("cudagraph_mode", ALL_MODES, 3)
        self.asked_mode = None if requested is None else GraphMode(requested)
        compile_ = cc.one_of("mode", COMPILE, 4)
        self.compile = None if compile_ is None else COMPILE.index(compile_)
        self.asked_sizes = cc.integers("cudagraph_capture_sizes")
        self.asked_max = cc.integer("max_cudagraph_capture_size")
        self.splitting = cc.given.get("splitting_ops")
        if self.splitting is not None and not isinstance(self.splitting, list):
            raise cc.refuse("splitting_ops", "vLLM wants a list of operators", "as in []")
        self.partition = cc.boolean("use_inductor_graph_partition", False) or False
        self.specialize = cc.boolean("cudagraph_specialize_lora", True) or False
        self.compiler = cc.text("backend") or "inductor"
        if self.compile == 3 and self.compiler not in ("eager", "inductor"):
            raise cc.refuse("backend", f"vLLM compiles in pieces with eager or inductor, not {self.compiler}", "")
        inner = cc.given.get("pass_config")
        if inner is not None and not isinstance(inner, dict):
            raise cc.refuse("pass_config", "vLLM wants an object", "")
        self.fuse_attention = Part(COMPILATION, "pass_config", inner).boolean("fuse_attn_quant", False) or False
        for flag, key in (("cudagraph_capture_sizes", "asked_sizes"), ("max_cudagraph_capture_size", "asked_max")):
            value = given.get(flag)
            if value is not None and getattr(self, key) is not None:
                name = "--" + flag.replace("_", "-")
                raise refusal(name, f"vLLM takes it once, and {COMPILATION} gives {flag} too", "drop one of both")
            if value is not None:
                setattr(self, key, value)
            self.sources[flag] = given.source(flag if flag in given.values else "compilation_config")
        ac = Part("--attention-config", "attention_config", given.get("attention_config"))
        inner_backend = backend_name("--attention-config", ac.text("backend"))
        asked = given.get("attention_backend")
        if asked is not None and inner_backend is not None:
            raise refusal(BACKEND_FLAG, "vLLM takes one backend, and --attention-config gives one too", "drop one")
        self.backend = inner_backend if asked is None else backend_name(BACKEND_FLAG, asked)
        self.flash_attn = ac.integer("flash_attn_version")
        if self.flash_attn not in (None, 2, 3, 4):
            raise ac.refuse("flash_attn_version", f"vLLM has no version {self.flash_attn}", "give 2, 3 or 4")
        self.trtllm = ac.boolean("use_trtllm_attention")
        level = given.get("optimization_level", "2")
        if level not in ("0", "1", "2", "3"):
            raise refusal("--optimization-level", f"vLLM has no level {level}", "give 0, 1, 2 or 3")
        self.level = int(level)
        self.performance = given.get("performance_mode", "balanced")

    def _model(self) -> None:
        given = self.given
        self.model: Model = read_model("--model", given.model or DEFAULT_MODEL)
        asked = given.get("max_model_len")
        if asked is not None and asked != -1:
            if asked <= 0:
                raise refusal("--max-model-len", f"vLLM wants a positive length, got {asked}", "give 1 or more")
            if self.model.known and asked > self.model.max_len:
                raise refusal(
                    "--max-model-len",
                    f"vLLM refuses {asked}: the model is made for {self.model.max_len}",
                    f"give at most {self.model.max_len}",
                )
        self.max_model_len = self.model.max_len if asked in (None, -1) else asked
        self.sources["max_model_len"] = given.source("max_model_len") if asked else self.model.source
        self.pooling = given.get("runner") == "pooling"
        self.eager = bool(given.get("enforce_eager", False))

    def _parallel(self) -> None:
        get = self.given.get
        self.tensor, self.data = get("tensor_parallel_size", 1), get("data_parallel_size", 1)
        self.pipeline = get("pipeline_parallel_size", 1)
        self.decode_context = get("decode_context_parallel_size", 1)
        self.expert = bool(get("enable_expert_parallel", False))
        self.all2all = get("all2all_backend", "allgather_reducescatter")
        self.ubatching = bool(get("enable_dbo", False)) or get("ubatch_size", 0) > 1
        for name in ("tensor", "data", "pipeline", "decode_context"):
            if getattr(self, name) < 1:
                raise refusal(f"--{name.replace('_', '-')}-parallel-size", "vLLM wants at least 1", "give 1 or more")
        if self.tensor % self.decode_context:
            raise refusal(
                "--decode-context-parallel-size",
                f"vLLM wants {self.tensor} tensor-parallel ranks to be a multiple of {self.decode_context}",
                "give a divisor",
            )
        model = self.model
        if model.heads % self.tensor:
            raise refusal(
                "--tensor-parallel-size", f"vLLM cannot split {model.heads} heads over {self.tensor}", "give a divisor"
            )
        if self.expert and model.known and not model.experts:
            raise refusal("--enable-expert-parallel", "vLLM finds no experts in the model", "leave it out")
        if self.decode_context > 1 and model.known and not model.mla:
            spread = self.tensor // model.kv_heads if self.tensor > model.kv_heads else 0
            grouped = model.heads // model.kv_heads
            if self.decode_context > spread or grouped % self.decode_context:
                raise refusal(
                    "--decode-context-parallel-size",
                    f"vLLM cannot split {model.kv_heads} KV heads on {self.tensor} ranks so",
                    "give more tensor-parallel ranks, or 1",
                )
        transfer = self.given.get("kv_transfer_config")
        self.connector: dict[str, Any] = transfer or {}
        if self.connector.get("kv_connector") == "NixlConnector":
            if self.decode_context not in (1, self.tensor) or (self.decode_context > 1 and not model.mla):
                raise refusal("--decode-context-parallel-size", "vLLM's NIXL connector takes 1 here", "give 1")

    # Budgets -------------------------------------------------------------------------------------

    def _batch_defaults(self) -> tuple[int, int]:
        """Return the tokens and requests that ``vllm serve`` starts from on this device."""
        device = self.environment.device
        if device.memory >= 160 * GiB:
            return 16384, 1024
        if device.memory >= 70 * GiB and "a100" not in device.name.lower() and device.sm != (12, 1):
            return 8192, 1024
        return 2048, 256

    def _budgets(self) -> None:
        given = self.given
        tokens, seqs = self._batch_defaults()
        asked_tokens, asked_seqs = given.get("max_num_batched_tokens"), given.get("max_num_seqs")
        if self.all2all in ("deepep_low_latency", "nixl_ep") and self.expert and self.data > 1:
            tokens = 256
        if self.performance == "throughput":
            tokens, seqs = 2 * tokens, 2 * seqs
        seqs = seqs if asked_seqs is None else asked_seqs
        chunked = given.get("enable_chunked_prefill")
        chunked = not self.model.encoder_decoder if chunked is None else chunked
        if not chunked:
            tokens = max(tokens, self.max_model_len)
        tokens = min(seqs * self.max_model_len, tokens) if asked_tokens is None else asked_tokens
        seqs = min(seqs, tokens) if asked_seqs is None else seqs
        self.tokens, self.seqs = tokens, seqs
        if seqs < 1:
            raise refusal("--max-num-seqs", f"vLLM wants at least 1, got {seqs}", "give 1 or more")
        if tokens < 1:
            raise refusal("--max-num-batched-tokens", f"vLLM wants at least 1, got {tokens}", "give 1 or more")
        if tokens < self.max_model_len and (not chunked or self.model.encoder_decoder):
            raise refusal(
                "--max-num-batched-tokens",
                f"vLLM refuses {tokens} for prompts of {self.max_model_len} that are not chunked",
                "give more tokens, a smaller --max-model-len, or leave chunked prefill on",
            )
        if tokens < seqs:
            raise refusal(
                "--max-num-batched-tokens",
                f"vLLM wants a token for each of {seqs} requests, got {tokens}",
                f"give {seqs} or more, or fewer --max-num-seqs",
            )
        active = given.get("max_num_active_seqs")
        if active is not None and active > seqs:
            raise refusal("--max-num-active-seqs", f"vLLM takes at most {seqs}, got {active}", "give less")

    def _adapters(self) -> None:
        given = self.given
        self.max_loras = given.get("max_loras", 1) if given.get("enable_lora", False) else 0
        if not given.get("enable_lora", False):
            self.lora_cases: tuple[int, ...] = (0,)
            return
        if self.max_loras < 1:
            raise refusal("--max-loras", f"vLLM wants at least 1, got {self.max_loras}", "give 1 or more")
        kept = given.get("max_cpu_loras")
        if kept is not None and 0 < kept < self.max_loras:
            raise refusal("--max-cpu-loras", f"vLLM wants at least --max-loras {self.max_loras}", "give more")
        if self.spec is not None and self.tokens < self.seqs * (self.spec.tokens + 1):
            raise refusal(
                "--max-num-batched-tokens",
                f"with adapters vLLM wants 1 + K tokens for each of {self.seqs} requests, got {self.tokens}",
                f"give {self.seqs * (self.spec.tokens + 1)} or more, or fewer draft tokens",
            )
        top = self.max_loras + 1
        self.specialize = self.specialize and bool(given.get("specialize_active_lora", False))
        powers = [1 << n for n in range(top.bit_length()) if 1 << n < top] if self.specialize else []
        self.lora_cases = (0, *powers, top)

    # Runner and modes ----------------------------------------------------------------------------

    def _runner(self) -> None:
        spec, variable = self.spec, self.given.variables.get("VLLM_USE_V2_MODEL_RUNNER")
        missing: list[str] = []
        if spec is not None:
            missing += [f"method {spec.method}"] if spec.method in ("suffix", "custom_class") else []
            missing += ["parallel drafting"] if spec.parallel else []
            missing += ["drafts of another vocabulary"] if spec.heterogeneous else []
        if self.ubatching and variable is None:
            missing.append("dual batch overlap")
        v2 = not missing if variable is None else variable == "1"
        if missing and variable is None:
            self.note("runner", "v2", "v1", f"model runner V2 has no {', '.join(missing)}, so V1 runs")
        if variable == "1":
            if self.ubatching:
                missing += ["overlap with LoRA"] if self.max_loras else []
                missing += ["overlap with speculation"] if spec is not None else []
                missing += ["overlap with pipeline parallelism"] if self.pipeline > 1 else []
                missing += ["overlap with context parallelism"] if self.decode_context > 1 else []
            if missing:
                raise refusal("VLLM_USE_V2_MODEL_RUNNER", f"vLLM's V2 has no {', '.join(missing)}", "leave it out")
        self.runner = Runner.V2 if v2 else Runner.V1
        if v2 and spec is not None and spec.max_len is not None and spec.max_len < self.max_model_len:
            self.note("draft-length", self.max_model_len, spec.max_len, "the draft model takes no longer prompts")
            self.max_model_len = spec.max_len
        blocked = spec is not None and (spec.method not in _ASYNC_ON_V1 or spec.unpadded)
        asked = self.given.get("async_scheduling")
        incompatible = self.runner is Runner.V1 and (blocked or self.pipeline > 1)
        if asked and incompatible:
            raise refusal("--async-scheduling", "vLLM's V1 runner cannot do it with these flags", "leave it out")
        self.asynchronous = not (self.pooling or incompatible) if asked is None else asked
        if self.runner is Runner.V1:
            lacking = spec is not None and (spec.adaptive or spec.draft_lm_head)
            if lacking or (self.pipeline > 1 and self.asynchronous):
                raise refusal("VLLM_USE_V2_MODEL_RUNNER", "vLLM's V1 runner lacks what the flags ask", "leave it out")

    def _compilation(self) -> None:
        if self.eager:
            self.compile, self.asked_mode = 0, GraphMode.NONE
        variable = self.given.variables.get("VLLM_USE_BREAKABLE_CUDAGRAPH")
        listed = self.model.architecture in names()["breakable_architectures"]
        self.breakable = listed if variable is None else variable == "1"
        if self.breakable:
            self.compile = 0
        if self.compile is None:
            self.compile = 3 if self.level else 0
        self.requested = self.asked_mode or GraphMode(_LEVELS[self.level])
        self.sources["cudagraph_mode"] = (
            "enforce_eager" if self.eager else f"-O{self.level}" if self.asked_mode is None else "flag"
        )
        self.sources["requested_mode"] = self.sources["cudagraph_mode"]
        self.sources["compilation_mode"] = "breakable" if self.breakable else self.sources["cudagraph_mode"]
        self.mode = self.requested

    def _schedule(self) -> None:
        spec = self.spec
        self.schedule = spec.schedule if spec is not None else None
        if spec is not None and self.schedule is not None:
            why = None
            if self.data > 1:
                why = "data-parallel ranks could draft different numbers of tokens"
            elif self.runner is Runner.V1 and spec.method not in _DYNAMIC_ON_V1:
                why = f"the V1 runner has no schedule for {spec.method}"
            if why is not None:
                self.note("schedule", "schedule", f"K = {spec.tokens}", f"{why}, so K is {spec.tokens} throughout")
                self.schedule = None
        if self.schedule is None:
            return
        check_schedule(self.schedule)
        if self.runner is Runner.V1 and GraphMode.FULL in self.mode.allowed:
            self._set_mode("schedule-v1", GraphMode.PIECEWISE, "the V1 runner captures no FULL graphs by schedule")

    def _without_compilation(self) -> None:
        """Drop piecewise graphs where nothing is compiled in pieces."""
        if self.mode.has_piecewise and self.compile != 3 and not self.breakable:
            says = f"compilation mode {COMPILE[self.compile or 0]} makes no pieces"
            self._set_mode("compilation", self.mode.without_piecewise, says)
            if self.mode is GraphMode.NONE:
                self.asked_max, self.asked_sizes = 0, []
                self._no_sizes()

    def _limit_modes(self) -> None:
        self._no_sizes()
        self._without_compilation()
        spec = self.spec
        if spec is not None and self.tokens <= spec.lookahead:
            raise refusal(
                "--max-num-batched-tokens",
                f"vLLM needs more than the {spec.lookahead} draft slots, got {self.tokens}",
                "give more tokens",
            )
        full = GraphMode.FULL in self.mode.allowed
        if full and self.pooling:
            self._set_mode("pooling", GraphMode.PIECEWISE, "pooling models have no FULL graphs")
        elif self.model.encoder_decoder and self.mode not in (GraphMode.NONE, GraphMode.FULL_DECODE_ONLY):
            self._set_mode("encoder-decoder", GraphMode.FULL_DECODE_ONLY, "only an encoder-decoder's decodes capture")
        extra = self.connector.get("kv_connector_extra_config") or {}
        layerwise = str(self.connector.get("kv_connector", "")).startswith("LMCache") and extra.get("use_layerwise")
        if layerwise and GraphMode.FULL in self.mode.allowed:
            self._set_mode("kv-connector", GraphMode.PIECEWISE, "this KV connector works between layers")

    def _sizes(self) -> None:
        if self.eager or self.mode is GraphMode.NONE:
            return self._no_sizes()
        spec, asked = self.spec, self.asked_sizes
        tokens = spec.tokens if spec is not None else 0
        if (self.tokens if self.asked_max is None else min(self.tokens, self.asked_max)) < 1:
            raise refusal("--max-cudagraph-capture-size", "vLLM wants a largest size of at least 1", "give 1 or more")
        if asked is not None and not asked:
            raise refusal("--cudagraph-capture-sizes", "vLLM wants at least one size", "give one, or mode NONE")
        limit = 1024 if self.environment.device.sm[0] == 10 else 512
        self.sizes = vllm_tokens(
            max_num_reqs=self.seqs,
            max_num_tokens=self.tokens,
            query_len=1 + tokens,
            platform_max=self.asked_limit or limit,
            tiers=self._tiers(),
            user_sizes=asked,
            user_max=self.asked_max,
            interactive=self.performance == "interactivity",
        )
        self.max_size = self.sizes[-1] if self.sizes else 0
        dropped = sorted(set(asked or ()) - set(self.sizes))
        if self.asked_max is not None and self.asked_max != self.max_size:
            if asked is not None:
                raise refusal(
                    "--max-cudagraph-capture-size",
                    f"vLLM refuses {self.asked_max}: the largest size given is {self.max_size}",
                    f"give {self.max_size}, or leave it out",
                )
            self.note("largest-size", self.asked_max, self.max_size, f"{self.max_size} is the largest size on the grid")
        if dropped:
            says = f"sizes above the budget of {self.tokens} tokens are dropped: {', '.join(map(str, dropped))}"
            self.note("sizes-beyond-budget", len(set(asked or ())), len(self.sizes), says)
        return None

    asked_limit: int | None = None

    def _dense(self) -> list[int] | None:
        """Return K by batch size from 0 on, gaps and tail carried forward, or None without a schedule."""
        if self.schedule is None or self.spec is None:
            return None
        found, last = [0], 0
        tiers = sorted(self.schedule)
        for size in range(1, self.seqs + 1):
            last = next((k for first, end, k in tiers if first <= size <= end), last)
            found.append(min(self.spec.tokens, last))
        return found

    def _tiers(self) -> list[tuple[int, int]]:
        dense = self._dense()
        widest = {1 + k: size for size, k in enumerate(dense or ()) if size}
        return list(widest.items())

    def _last_rewrites(self) -> None:
        self._without_compilation()
        if self.runner is Runner.V2 and self.compile == 1 and self.mode is not GraphMode.NONE:
            self._set_mode("stock-compile", GraphMode.NONE, "V2 captures nothing around stock torch.compile")
            self._no_sizes()
        both = self.ubatching and self.runner is Runner.V2
        if both and self.mode is GraphMode.PIECEWISE:
            raise refusal("--enable-dbo", "vLLM's V2 has no overlap with PIECEWISE graphs", "ask for a FULL mode")
        self._check_adaptive()
        self._split()
        if self.ubatching and self.all2all not in _MICROBATCHING:
            raise refusal("--all2all-backend", f"vLLM overlaps no batches with {self.all2all}", "deepep_low_latency")

    def _check_adaptive(self) -> None:
        spec = self.spec
        if spec is None or not spec.adaptive:
            return
        key = "enable_adaptive_verification"
        if self.max_loras:
            raise refusal(SPECULATIVE, "vLLM has no adaptive verification with LoRA", "drop one of both", key)
        if GraphMode.FULL not in self.mode.allowed:
            raise refusal(SPECULATIVE, f"vLLM needs FULL graphs for it, and has {self.mode.value}", "", key)
        if self.pipeline > 1:
            raise refusal(SPECULATIVE, "vLLM has no adaptive verification with pipelines", "drop one of both", key)

    def _split(self) -> None:
        """Decide what divides the compiled graph, and what that does to the mode."""
        if self.compile != 3:
            self.splitting = [] if self.splitting is None else self.splitting
        elif self.fuse_attention and not self.partition:
            if self.splitting is None:
                self.splitting = []
                if self.mode.has_piecewise:
                    self._set_mode("fused-attention", GraphMode.FULL, "attention is fused into the compiled graph")
            if self._splits_attention():
                raise refusal(COMPILATION, "vLLM cannot fuse attention that it splits off", "", "splitting_ops")
        elif self.splitting is None:
            self.splitting = [*names()["attention_ops"]]
        elif not self.splitting:
            after = {GraphMode.PIECEWISE: GraphMode.NONE, GraphMode.FULL_AND_PIECEWISE: GraphMode.FULL}
            self._set_mode("nothing-split", after.get(self.mode, self.mode), "no operator divides the graph")
        ranks = self.data if self.model.experts else 1
        if self.compile == 3 and self.all2all == "deepep_high_throughput" and ranks > 1:
            self._set_mode("deepep", GraphMode.NONE, "DeepEP's high-throughput kernels are not captured")

    def _splits_attention(self) -> bool:
        return self.splitting is not None and all(op in self.splitting for op in names()["attention_ops"])

    # Resolution ----------------------------------------------------------------------------------

    def settings(self) -> VllmSettings:
        """Choose the attention backends, and resolve the mode of every manager."""
        spec = self.spec
        tokens = spec.tokens if spec is not None else 0
        attention = self._attention(self.model)
        backend = attention.choose(BACKEND_FLAG, self.backend)
        support = attention.support(backend)
        narrowest, fused = backend, False
        if spec is not None and spec.has_draft_cache:
            drafting = self._attention(spec.model)
            independent, v2 = spec.method == "draft_model", self.runner is Runner.V2
            # V1 never hands the target's backend on; V2 does, and gives an independent model nothing else.
            asked = spec.backend if not v2 else self.backend if independent else spec.backend or self.backend
            alone = attrs.evolve(drafting, decode_context=1) if independent and v2 else drafting
            draft = alone.choose(SPECULATIVE, asked)
            fused = drafting.refreshes(draft) and tokens > 1 and spec.drafter is Drafter.CHAIN
            if drafting.support(draft) < support:
                narrowest, support = draft, drafting.support(draft)
        pieces = self.breakable or self.compile == 3
        varlen = spec is not None and spec.adaptive and spec.has_draft_cache
        if varlen:
            if not attention.varies(backend):
                key = "enable_adaptive_verification"
                raise refusal(SPECULATIVE, f"vLLM's {backend} graphs take one query length", "leave it out", key)
            wanted = GraphMode.FULL_AND_PIECEWISE if pieces else GraphMode.FULL_DECODE_ONLY
            if self.mode is not GraphMode.FULL_DECODE_ONLY:
                self._set_mode("adaptive", wanted, "adaptive verification has decode graphs of its own")
        configured = self.mode
        ladder = Ladder(
            support=support,
            backend=narrowest,
            query_len=1 + tokens,
            splits_attention=self._splits_attention(),
            graph_partition=self.partition,
            compiles=self.compile == 3,
            piecewise_capture=pieces,
            note=lambda rule, old, new, says: self.note(rule, old.value, new.value, says, backend=narrowest),
        )
        mode = ladder.resolve(self.mode)
        if self.runner is Runner.V1 and mode.decode_mode is GraphMode.FULL and tokens:
            self._round(1 + tokens)
        prefill, decode = self._draft_modes(mode)
        return VllmSettings(
            runner=self.runner,
            sizes=self.sizes,
            max_size=self.max_size,
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.tokens,
            max_model_len=self.max_model_len,
            requested_mode=self.requested,
            configured_mode=configured,
            mode=mode,
            draft_prefill_mode=prefill,
            draft_decode_mode=decode,
            drafter=spec.drafter if spec is not None else Drafter.NONE,
            method=spec.method if spec is not None else None,
            num_speculative_tokens=tokens,
            schedule=self.schedule,
            decode_query_lens=tuple(sorted({1 + k for k in (self._dense() or [0, tokens])[1:]})),
            draft_fused=fused,
            lora_cases=self.lora_cases,
            varlen=varlen,
            data_parallel_size=self.data,
            tensor_parallel_size=self.tensor,
            max_loras=self.max_loras,
            specialize_lora=self.specialize and bool(self.max_loras),
            compilation=COMPILE[self.compile or 0],
            async_scheduling=self.asynchronous,
            backend=backend,
        )

    def _attention(self, model: Model) -> Attention:
        return Attention(
            capability=self.environment.device.sm,
            model=model,
            tensor=self.tensor,
            decode_context=self.decode_context,
            flash_attn=self.flash_attn,
            trtllm=self.trtllm,
            connector=bool(self.connector),
            adaptive=self.spec is not None and self.spec.adaptive,
        )

    def _draft_modes(self, mode: GraphMode) -> tuple[GraphMode | None, GraphMode | None]:
        drafter = self.spec.drafter if self.spec is not None else Drafter.NONE
        if self.runner is Runner.V1 or drafter is Drafter.NONE:
            return None, None
        decode = GraphMode.FULL_DECODE_ONLY if mode.decode_mode is GraphMode.FULL else GraphMode.NONE
        if drafter is Drafter.MODULES:
            return (decode if mode.has_piecewise and not self.breakable else mode), None
        return mode, decode

    def _round(self, query_len: int) -> None:
        """Round sizes up to whole requests, as the V1 runner does; those beyond the largest go."""
        if not self.sizes:
            return
        rounded = {-(-size // query_len) * query_len for size in self.sizes}
        kept = sorted(size for size in rounded if size <= self.max_size)
        if not kept and query_len <= self.max_size:
            kept = [query_len]
        if not kept:
            raise refusal(
                "--cudagraph-capture-sizes",
                f"vLLM's V1 runner finds no multiple of {query_len} up to {self.max_size}",
                f"give {query_len} or more",
            )
        self.note("whole-requests", len(self.sizes), len(kept), f"sizes are rounded up to multiples of {query_len}")
        self.sizes, self.max_size = tuple(kept), kept[-1]
