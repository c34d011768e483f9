"""vLLM's configuration: which runner, which mode and which sizes, rewritten in vLLM's order."""

from __future__ import annotations

from capture_planner.modes import GraphMode
from capture_planner.planning.sizing.engine_lists import vllm_tokens
from capture_planner.records.environment import Environment
from capture_planner_vllm.asked import COMPILATION, GRID, Flags
from capture_planner_vllm.connector import works_between_layers
from capture_planner_vllm.flags import Given, refusal
from capture_planner_vllm.parts import COMPILE, names
from capture_planner_vllm.schedule import draft_tokens, normalized
from capture_planner_vllm.settings import Drafter, Runner
from capture_planner_vllm.speculation import FLAG as SPECULATIVE
from capture_planner_vllm.unemulated import not_emulated

_LEVELS = {0: "NONE", 1: "PIECEWISE", 2: "FULL_AND_PIECEWISE", 3: "FULL_AND_PIECEWISE"}
_DYNAMIC_ON_V1 = ("ngram", "eagle", "eagle3", "mtp", "draft_model", "dflash")
_ASYNC_ON_V1 = ("eagle", "eagle3", "mtp", "ngram_gpu", "draft_model")
_WIDE = "GptOssForCausalLM"
_MICROBATCHING = ("deepep_low_latency", "deepep_high_throughput", "nixl_ep")


class Configuration(Flags):
    """One run through vLLM's configuration; its attributes are what vLLM's own objects hold at each step."""

    runner: Runner
    mode: GraphMode
    """The mode as it stands; the last rewrite leaves the target's, before backends are known."""
    sizes: tuple[int, ...]
    max_size: int
    schedule: tuple[tuple[int, int, int], ...] | None
    compiled_sizes: tuple[int, ...]
    """The sizes that are compiled for by themselves, in tokens."""
    drafted: tuple[int, ...]
    """Draft tokens of each batch size, as ``schedule.draft_tokens`` returns them."""

    def __init__(self, given: Given, environment: Environment) -> None:
        super().__init__(given, environment)
        self._runner()
        self._compilation()
        self._schedule()
        self._limit_modes()
        self._sizes()
        grid = [self.sizes if each == GRID else (int(each),) for each in self.asked_compiled]
        self.compiled_sizes = tuple(size for sizes in grid for size in sizes)
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
        self._schedule_without_full()
        independent, own = spec.method == "draft_model", spec.backend is not None
        copies = spec.copies
        if self.runner is Runner.V1:
            copies += not own  # it sets the backend in a copy, given or not
        elif independent or spec.drafter is Drafter.PARALLEL:
            copies = 0 if independent else 1
        for _ in range(copies):
            self._rewrite_again()
        runner, overlaps = self.runner, self.ubatching
        if independent:
            # An independent draft's ranks overlap nothing, so that its copy may be one for V2.
            self.ubatching = False
            if self.given.variables.get("VLLM_USE_V2_MODEL_RUNNER") is None and not self._v2_lacks():
                self.runner = Runner.V2
            self._check_state(spec.length)
            self._rewrite_again(of_target=False)
            self.runner, self.ubatching = runner, overlaps

    def _rewrite_again(self, *, of_target: bool = True) -> None:
        self.asked_sizes, self.asked_max = list(self.sizes), self.max_size
        self._limit_modes(of_target=of_target)
        self._sizes()
        self._last_rewrites()

    def _check_state(self, length: int) -> None:
        """Refuse a state for the whole prompt that is kept in blocks of another length."""
        block = self.given.get("mamba_block_size")
        if self.given.get("enable_prefix_caching", True):
            return
        if block is None and self.model.recurrent:
            block = self.state_block
        if block is not None and block != length:
            reason = f"vLLM keeps a recurrent state of {block} tokens, and has a model for {length}"
            raise refusal("--enable-prefix-caching", reason, "leave prefix caching on")

    def _v2_lacks(self) -> list[str]:
        """Return what model runner V2 has not, of the flags; overlap is not counted."""
        spec = self.spec
        if spec is None:
            return []
        missing = [f"method {spec.method}"] if spec.method in ("suffix", "custom_class") else []
        missing += ["parallel drafting"] if spec.parallel else []
        return missing + (["drafts of another vocabulary"] if spec.heterogeneous else [])

    def set_mode(self, rule: str, mode: GraphMode, says: str) -> None:
        if mode is not self.mode:
            self.note(rule, self.mode.value, mode.value, f"{says}: {self.mode.value} becomes {mode.value}")
            self.sources["cudagraph_mode"] = rule
            self.mode = mode

    def _no_sizes(self) -> None:
        self.sizes, self.max_size = (), 0

    def _runner(self) -> None:
        spec, variable = self.spec, self.given.variables.get("VLLM_USE_V2_MODEL_RUNNER")
        self.state_block = self.max_model_len
        missing = self._v2_lacks()
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
                missing += ["overlap with several kinds of input"] if self.model.multimodal else []
                missing += ["overlap with recurrent layers"] if self.model.recurrent else []
                missing += ["overlap with context parallelism"] if self.decode_context > 1 else []
            if missing:
                raise refusal(
                    "VLLM_USE_V2_MODEL_RUNNER", f"vLLM's V2 has no {', '.join(missing)}", "leave it out"
                )
        self.runner = Runner.V2 if v2 else Runner.V1
        if self.ubatching and self.data == 1:
            self.note(
                "overlap", "on", "off", "one data-parallel rank splits no batch, and has no graph for it"
            )
        if spec is not None and spec.method == "dspark" and not v2:
            raise refusal(SPECULATIVE, "vLLM's V1 runner has no dspark", "leave V2 on", "method")
        if spec is not None and spec.method == "draft_model" and not v2 and spec.tensor != self.tensor:
            reason = f"vLLM's V1 runner wants the target's {self.tensor} ranks, got {spec.tensor}"
            raise refusal(SPECULATIVE, reason, "leave V2 on", "draft_tensor_parallel_size")
        if spec is not None and spec.method == "dflash" and not v2:
            raise not_emulated(SPECULATIVE, "dflash on model runner V1", "leave V2 on", "method")
        if v2 and spec is not None and spec.max_len is not None and spec.max_len < self.max_model_len:
            self.note(
                "draft-length", self.max_model_len, spec.max_len, "the draft model takes no longer prompts"
            )
            self.max_model_len = spec.max_len
        self._check_state(self.max_model_len)
        blocked = spec is not None and (spec.method not in _ASYNC_ON_V1 or spec.unpadded)
        asked = self.given.get("async_scheduling")
        incompatible = self.runner is Runner.V1 and (blocked or self.pipeline > 1)
        if asked and incompatible:
            raise refusal(
                "--async-scheduling", "vLLM's V1 runner cannot do it with these flags", "leave it out"
            )
        self.asynchronous = not (self.pooling or incompatible) if asked is None else asked
        if self.runner is Runner.V1:
            lacking = spec is not None and (spec.adaptive or spec.draft_lm_head)
            if lacking or (self.pipeline > 1 and self.asynchronous):
                raise refusal(
                    "VLLM_USE_V2_MODEL_RUNNER", "vLLM's V1 runner lacks what the flags ask", "leave it out"
                )

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
                self.note(
                    "schedule", "schedule", f"K = {spec.tokens}", f"{why}, so K is {spec.tokens} throughout"
                )
                self.schedule = None
        tiers = () if self.schedule is None else normalized([*self.schedule])
        tokens = spec.tokens if spec is not None else 0
        self.drafted = draft_tokens(tiers, max_num_reqs=self.seqs, num_speculative=tokens)
        self._schedule_without_full()

    def _schedule_without_full(self) -> None:
        if self.schedule is not None and self.runner is Runner.V1 and GraphMode.FULL in self.mode.allowed:
            says = "the V1 runner captures no FULL graphs by schedule"
            self.set_mode("schedule-v1", GraphMode.PIECEWISE, says)

    def _without_compilation(self) -> None:
        """Drop piecewise graphs where nothing is compiled in pieces."""
        if self.mode.has_piecewise and self.compile != 3 and not self.breakable:
            says = f"compilation mode {COMPILE[self.compile or 0]} makes no pieces"
            self.set_mode("compilation", self.mode.without_piecewise, says)
            if self.mode is GraphMode.NONE:
                self.asked_max, self.asked_sizes = 0, []
                self._no_sizes()

    def _limit_modes(self, *, of_target: bool = True) -> None:
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
        if not of_target:
            pass  # an independent draft is a plain decoder
        elif full and self.pooling:
            self.set_mode("pooling", GraphMode.PIECEWISE, "pooling models have no FULL graphs")
        elif self.model.encoder_decoder and self.mode not in (GraphMode.NONE, GraphMode.FULL_DECODE_ONLY):
            self.set_mode(
                "encoder-decoder", GraphMode.FULL_DECODE_ONLY, "only an encoder-decoder's decodes capture"
            )
        if works_between_layers(self.connector) and GraphMode.FULL in self.mode.allowed:
            self.set_mode("kv-connector", GraphMode.PIECEWISE, "this KV connector works between layers")

    def _sizes(self) -> None:
        if self.eager or self.mode is GraphMode.NONE:
            return self._no_sizes()
        if self.model.architecture == _WIDE and self.asked_sizes is None and self.asked_max is None:
            self.note("model", 512, 1024, "for this model vLLM raises the largest size to 1024")
            self.asked_max = 1024
        spec, asked = self.spec, self.asked_sizes
        tokens = spec.tokens if spec is not None else 0
        if (self.tokens if self.asked_max is None else min(self.tokens, self.asked_max)) < 1:
            raise refusal(
                "--max-cudagraph-capture-size", "vLLM wants a largest size of at least 1", "give 1 or more"
            )
        if asked is not None and not asked:
            raise refusal(
                "--cudagraph-capture-sizes", "vLLM wants at least one size", "give one, or mode NONE"
            )
        limit = 1024 if self.environment.device.sm[0] == 10 else 512
        self.sizes = vllm_tokens(
            max_num_reqs=self.seqs,
            max_num_tokens=self.tokens,
            query_len=1 + tokens,
            platform_max=limit,
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
            self.note(
                "largest-size",
                self.asked_max,
                self.max_size,
                f"{self.max_size} is the largest size on the grid",
            )
        if dropped:
            says = (
                f"sizes above the budget of {self.tokens} tokens are dropped: {', '.join(map(str, dropped))}"
            )
            self.note("sizes-beyond-budget", len(set(asked or ())), len(self.sizes), says)
        return None

    def _tiers(self) -> list[tuple[int, int]]:
        if self.schedule is None:
            return []
        widest = {1 + k: size for size, k in enumerate(self.drafted) if size}
        return list(widest.items())

    def _last_rewrites(self) -> None:
        self._without_compilation()
        if self.runner is Runner.V2 and self.compile == 1 and self.mode is not GraphMode.NONE:
            self.set_mode("stock-compile", GraphMode.NONE, "V2 captures nothing around stock torch.compile")
            self._no_sizes()
        both = self.ubatching and self.runner is Runner.V2
        if both and self.mode is GraphMode.PIECEWISE:
            raise refusal(
                "--enable-dbo", "vLLM's V2 has no overlap with PIECEWISE graphs", "ask for a FULL mode"
            )
        self._check_adaptive()
        self._split()
        if self.ubatching and self.all2all not in _MICROBATCHING:
            raise refusal(
                "--all2all-backend", f"vLLM overlaps no batches with {self.all2all}", "deepep_low_latency"
            )

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
            raise refusal(
                SPECULATIVE, "vLLM has no adaptive verification with pipelines", "drop one of both", key
            )

    def _split(self) -> None:
        """Decide what divides the compiled graph, and what that does to the mode."""
        if self.compile != 3:
            self.splitting = [] if self.splitting is None else self.splitting
        elif self.fuse_attention and not self.partition:
            if self.splitting is None:
                self.splitting = []
                if self.mode.has_piecewise:
                    self.set_mode(
                        "fused-attention", GraphMode.FULL, "attention is fused into the compiled graph"
                    )
            if self.splits_attention():
                raise refusal(
                    COMPILATION, "vLLM cannot fuse attention that it splits off", "", "splitting_ops"
                )
        elif self.splitting is None:
            self.splitting = [*names()["attention_ops"]]
        elif not self.splitting:
            after = {GraphMode.PIECEWISE: GraphMode.NONE, GraphMode.FULL_AND_PIECEWISE: GraphMode.FULL}
            self.set_mode("nothing-split", after.get(self.mode, self.mode), "no operator divides the graph")
        ranks = self.data if self.model.experts else 1
        if self.compile == 3 and self.all2all == "deepep_high_throughput" and ranks > 1:
            self.set_mode("deepep", GraphMode.NONE, "DeepEP's high-throughput kernels are not captured")

    @property
    def captures_pieces(self) -> bool:
        """Whether anything is captured in pieces."""
        return self.breakable or self.compile == 3

    def splits_attention(self) -> bool:
        return self.splitting is not None and all(op in self.splitting for op in names()["attention_ops"])

    @property
    def compiles_around_attention(self) -> bool:
        """Whether pieces end where attention begins, as model runner V1 wants them."""
        if not self.splits_attention():
            return False
        return self.compiler == "inductor" and self.compile != 0 if self.partition else self.compile == 3
