"""vLLM's configuration: which runner, which mode and which sizes, rewritten in vLLM's order."""

from __future__ import annotations

from capture_planner.engines.parsing import refusal
from capture_planner.modes import GraphMode
from capture_planner.planning.sizing.engine_lists import vllm_tokens
from capture_planner.records.environment import Environment
from capture_planner_vllm.emulation.connector import works_between_layers
from capture_planner_vllm.emulation.flags import CommandLine
from capture_planner_vllm.emulation.model import WIDE
from capture_planner_vllm.emulation.options import COMPILATION, ServeOptions
from capture_planner_vllm.emulation.parts import COMPILE
from capture_planner_vllm.emulation.refusals import not_emulated
from capture_planner_vllm.emulation.releases import has, tabled
from capture_planner_vllm.emulation.schedule import draft_tokens, normalized
from capture_planner_vllm.emulation.settings import DrafterKind, RunnerVersion
from capture_planner_vllm.emulation.speculation import SPECULATIVE
from capture_planner_vllm.emulation.tables import names

_ADDED_SIZES = {"requests": "requests_are_a_size", "widths": "widths_are_sizes", "budget": "budget_is_a_size"}
"""What releases have added to the list of sizes, by the name in the table of releases."""
_V2 = "VLLM_USE_V2_MODEL_RUNNER"
_LEVELS = {0: "NONE", 1: "PIECEWISE", 2: "FULL_AND_PIECEWISE", 3: "FULL_AND_PIECEWISE"}
_DYNAMIC_ON_V1 = ("ngram", "eagle", "eagle3", "mtp", "draft_model", "dflash")
_ASYNC_ON_V1 = ("eagle", "eagle3", "mtp", "ngram_gpu", "draft_model", "dflash", "dspark")
_MICROBATCHING = ("deepep_low_latency", "deepep_high_throughput", "nixl_ep")


class Configuration(ServeOptions):
    """One run through vLLM's configuration; its attributes are what vLLM's own objects hold at each step."""

    runner: RunnerVersion
    mode: GraphMode
    """The current mode; after the last rewrite the target's, before backends are known."""
    sizes: tuple[int, ...]
    max_size: int
    schedule: tuple[tuple[int, int, int], ...] | None
    drafted: tuple[int, ...]
    """Draft tokens of each batch size, as ``schedule.draft_tokens`` returns them."""

    def __init__(self, line: CommandLine, environment: Environment) -> None:
        super().__init__(line, environment)
        self._runner()
        self._compilation()
        self._schedule()
        self._limit_modes()
        self._sizes()
        self._last_rewrites()
        self._load_draft()

    def set_mode(self, rule: str, mode: GraphMode, message: str) -> None:
        """Rewrite the mode, and note the decision where that changes it."""
        if mode is not self.mode:
            self.note(rule, self.mode.value, mode.value, f"{message}: {self.mode.value} becomes {mode.value}")
            self.sources["cudagraph_mode"] = rule
            self.mode = mode

    def _runner(self) -> None:
        spec, variable = self.spec, self.line.variables.get(_V2)
        state_length = self.max_model_len
        missing = self._missing_in_v2()
        if variable is None:
            # V2 overlaps microbatches as well, but only where the variable asks for V2.
            missing += ["dual batch overlap"] if self.ubatching else []
            if missing:
                self.note("runner", "v2", "v1", f"model runner V2 has no {', '.join(missing)}, so V1 runs")
        elif variable == "1":
            missing += self._overlap_missing_in_v2()
            if missing:
                raise refusal(_V2, f"vLLM's V2 runner has no {', '.join(missing)}", "leave it out")
        v2 = variable == "1" or (variable is None and not missing and self._defaults_to_v2())
        self.runner = RunnerVersion.V2 if v2 else RunnerVersion.V1
        if not v2:
            self._check_drafter_on_v1()
        if self.ubatching and self.data == 1:
            self.note("overlap", "on", "off", "a single data-parallel rank splits no batch, and has no graph for it")
        longest = spec.max_len if v2 and spec is not None and has("draft-bounds-length") else None
        # V2 cannot skip the drafter for longer sequences (_limit_max_model_len_to_draft).
        if longest is not None and longest < self.max_model_len:
            self.note("draft-length", self.max_model_len, longest, "the draft model takes no longer prompts")
            self.max_model_len = longest
        self._check_state(state_length, self.max_model_len)
        if spec is not None and spec.length is not None:
            self._check_state(state_length, spec.length)
        # Limits of V1 (v1_async_sched_incompat, config/vllm.py); before 0.33 V2 had those of drafters too.
        without_async = spec is not None and (spec.method not in _ASYNC_ON_V1 or spec.unpadded)
        either = v2 and has("async-on-v2")
        incompatible = (without_async and not either) or (not v2 and self.pipeline > 1)
        asynchronous = self.line.get("async_scheduling")
        if asynchronous and incompatible:
            message = f"vLLM's {self.runner.value.upper()} runner does not support it with these flags"
            raise refusal("--async-scheduling", message, "leave it out")
        self.asynchronous: bool = not (self.pooling or incompatible) if asynchronous is None else asynchronous
        adaptive = spec is not None and spec.adaptive
        if not v2 and (adaptive or (self.pipeline > 1 and self.asynchronous)):
            lacking = "adaptive verification" if adaptive else "asynchronous pipeline parallelism"
            raise refusal(_V2, f"vLLM's V1 runner has no {lacking}", "leave it out")

    def _defaults_to_v2(self) -> bool:
        """Say whether model runner V2 is the default for the model; before 0.29 it was for some alone."""
        listed = tabled("v2_architectures", ["all"])
        dense = not (self.model.experts or self.model.recurrent)
        if "all" in listed or self.model.architecture in listed or ("dense" in listed and dense):
            return True
        self.note("runner", "v2", "v1", "V2 is the default of other models, so V1 runs")
        return False

    def _check_drafter_on_v1(self) -> None:
        spec = self.spec
        if spec is None:
            return
        if spec.method == "dspark":
            raise refusal(SPECULATIVE, "vLLM's V1 runner has no dspark", "keep model runner V2", "method")
        if spec.method == "draft_model" and spec.tensor != self.tensor:
            message = f"vLLM's V1 runner requires the target's {self.tensor} ranks, got {spec.tensor}"
            raise refusal(SPECULATIVE, message, "keep model runner V2", "draft_tensor_parallel_size")
        if spec.method == "dflash":
            raise not_emulated(SPECULATIVE, "dflash on model runner V1", "keep model runner V2", "method")

    def _check_state(self, block: int, length: int) -> None:
        """Raise where prefixes are not cached and recurrent states cover another length than the model's."""
        if self.line.get("enable_prefix_caching", True):
            return
        given = self.line.get("mamba_block_size")
        block = given if given is not None else block if self.model.recurrent else length
        if block != length:
            message = f"the recurrent state covers {block} tokens, and the model's length is {length}"
            raise refusal("--enable-prefix-caching", message, "keep prefix caching on")

    def _missing_in_v2(self) -> list[str]:
        """Return the features of the flags that model runner V2 lacks, except overlap."""
        spec = self.spec
        if spec is None:
            return []
        missing = [f"method {spec.method}"] if spec.method in ("suffix", "custom_class") else []
        missing += ["parallel drafting"] if spec.parallel else []
        return missing + (["drafts of another vocabulary"] if spec.heterogeneous else [])

    def _overlap_missing_in_v2(self) -> list[str]:
        """Return what model runner V2 cannot combine with dual batch overlap."""
        others = {
            "LoRA": self.max_loras > 0,
            "speculation": self.spec is not None,
            "pipeline parallelism": self.pipeline > 1,
            "multimodal input": self.model.multimodal,
            "recurrent layers": self.model.recurrent,
            "context parallelism": self.decode_context > 1,
        }
        return [f"overlap with {name}" for name, present in others.items() if present and self.ubatching]

    def _compilation(self) -> None:
        if self.eager:
            self.compile, self.user_mode = 0, GraphMode.NONE
        variable = self.line.variables.get("VLLM_USE_BREAKABLE_CUDAGRAPH")
        breakable = self.model.architecture in names()["breakable_architectures"]
        self.breakable = breakable if variable is None else variable == "1"
        # These graphs are cut at attention while they are captured, so nothing needs to be compiled.
        if self.breakable:
            self.compile = 0
        if self.compile is None:
            self.compile = 3 if self.level else 0
        self.mode = self.requested = self.user_mode or GraphMode(_LEVELS[self.level or 0])
        source = "enforce_eager" if self.eager else f"-O{self.level}" if self.user_mode is None else "flag"
        self.sources["cudagraph_mode"] = self.sources["requested_mode"] = source
        self.sources["compilation_mode"] = "breakable" if self.breakable else source

    def _schedule(self) -> None:
        spec = self.spec
        self.schedule = spec.schedule if spec is not None else None
        tokens = spec.tokens if spec is not None else 0
        if spec is not None and self.schedule is not None:
            reason = None
            # Ranks would wait for each other's collectives (_maybe_disable_dynamic_sd_for_data_parallel).
            if self.data > 1:
                reason = "data-parallel ranks could draft different numbers of tokens"
            elif self.runner is RunnerVersion.V1 and spec.method not in _DYNAMIC_ON_V1 and has("schedule-by-method"):
                reason = f"the V1 runner has no schedule for {spec.method}"
            if reason is not None:
                self.note("schedule", "schedule", f"K = {tokens}", f"{reason}, so K is {tokens} throughout")
                self.schedule = None
        tiers = () if self.schedule is None else normalized([*self.schedule])
        self.drafted = draft_tokens(tiers, max_num_reqs=self.seqs, num_speculative=tokens)
        self._schedule_without_full()

    def _schedule_without_full(self) -> None:
        on_v1 = self.schedule is not None and self.runner is RunnerVersion.V1
        if on_v1 and GraphMode.FULL in self.mode.allowed:
            self.set_mode("schedule-v1", GraphMode.PIECEWISE, "the V1 runner captures no FULL graphs with a schedule")

    def _limit_modes(self, *, of_target: bool = True) -> None:
        """Apply the limits of compilation, model and connector; ``of_target``: not an independent draft's."""
        self.sizes, self.max_size = (), 0
        self._without_compilation()
        spec = self.spec
        if spec is not None and self.tokens <= spec.lookahead:
            message = f"vLLM requires more than the {spec.lookahead} draft slots, got {self.tokens}"
            raise refusal("--max-num-batched-tokens", message, "give more tokens")
        if of_target and self.pooling and GraphMode.FULL in self.mode.allowed:
            self.set_mode("pooling", GraphMode.PIECEWISE, "pooling models have no FULL graphs")
        elif of_target and self.model.encoder_decoder and self.mode is not GraphMode.NONE:
            message = "only decodes of an encoder-decoder are captured"
            self.set_mode("encoder-decoder", GraphMode.FULL_DECODE_ONLY, message)
        # A graph of the whole forward leaves the connector no place between two layers.
        if works_between_layers(self.connector) and GraphMode.FULL in self.mode.allowed:
            self.set_mode("kv-connector", GraphMode.PIECEWISE, "this KV connector works between layers")

    def _without_compilation(self) -> None:
        """Drop PIECEWISE graphs where nothing is compiled piecewise."""
        if self.mode.has_piecewise and not self.captures_pieces:
            message = f"compilation mode {COMPILE[self.compile or 0]} compiles nothing piecewise"
            self.set_mode("compilation", self.mode.without_piecewise, message)
            if self.mode is GraphMode.NONE:
                self.user_max, self.user_sizes = 0, []
                self.sizes, self.max_size = (), 0

    def _sizes(self) -> None:
        if self.eager or self.mode is GraphMode.NONE:
            self.sizes, self.max_size = (), 0
            return
        # GptOssForCausalLMConfig of models/config.py; sizes of the user's own stay.
        if self.model.architecture == WIDE and self.user_sizes is None and self.user_max is None:
            self.note("model", 512, 1024, "for this model vLLM raises the largest size to 1024")
            self.user_max = 1024
        spec, user = self.spec, self.user_sizes
        if min(self.tokens, self.tokens if self.user_max is None else self.user_max) < 1:
            message = f"vLLM requires a largest size of at least 1, got {self.user_max}"
            raise refusal("--max-cudagraph-capture-size", message, "give 1 or more")
        if user is not None and not user:
            raise refusal("--cudagraph-capture-sizes", "vLLM requires at least one size", "give one, or mode NONE")
        # Each tier has the sizes of its own width, up to its widest batch: a later count replaces the earlier.
        widest = {1 + k: size for size, k in enumerate(self.drafted) if size}
        self.sizes = vllm_tokens(
            max_num_reqs=self.seqs,
            max_num_tokens=self.tokens,
            query_len=1 + (spec.tokens if spec is not None else 0),
            platform_max=tabled("largest_size_sm100", 1024)
            if self.environment.device.sm[0] == 10 and not self.other_device
            else tabled("largest_size", 512),
            tiers=[] if self.schedule is None else list(widest.items()),
            user_sizes=user,
            user_max=self.user_max,
            interactive=self.performance == "interactivity",
            older={name for name, added in _ADDED_SIZES.items() if not tabled(added, True)},
        )
        self.max_size = self.sizes[-1] if self.sizes else 0
        if self.user_max is not None and self.user_max != self.max_size:
            if user is not None:
                message = f"{self.user_max} is not the largest capture size, which is {self.max_size}"
                raise refusal("--max-cudagraph-capture-size", message, "leave it out")
            self.note("largest-size", self.user_max, self.max_size, f"{self.max_size} is the largest size on the grid")
        dropped = sorted(set(user or ()) - set(self.sizes))
        if dropped:
            message = f"sizes above {self.tokens} tokens are dropped: {', '.join(map(str, dropped))}"
            self.note("sizes-beyond-budget", len(set(user or ())), len(self.sizes), message)

    def _last_rewrites(self) -> None:
        self._without_compilation()
        # V1 wraps no model of stock torch.compile in graphs, and V2 follows it.
        if self.runner is RunnerVersion.V2 and self.compile == 1 and self.mode is not GraphMode.NONE:
            self.set_mode("stock-compile", GraphMode.NONE, "V2 captures nothing around stock torch.compile")
            self.sizes, self.max_size = (), 0
        if self.ubatching and self.runner is RunnerVersion.V2 and self.mode is GraphMode.PIECEWISE:
            message = "vLLM's V2 runner has no overlap with PIECEWISE graphs"
            raise refusal("--enable-dbo", message, "ask for a FULL mode")
        if self.spec is not None and self.spec.adaptive:
            self._check_adaptive()
        self._split()
        if self.ubatching and self.all2all not in _MICROBATCHING:
            message = f"{self.all2all} does not support dual batch overlap"
            raise refusal("--all2all-backend", message, "give deepep_low_latency")

    def _check_adaptive(self) -> None:
        others = {
            "LoRA": self.max_loras > 0,
            f"mode {self.mode.value}": GraphMode.FULL not in self.mode.allowed,
            "pipeline parallelism": self.pipeline > 1,
        }
        for name, present in others.items():
            if present:
                message = f"vLLM has no adaptive verification with {name}"
                raise refusal(SPECULATIVE, message, "drop one of both", "enable_adaptive_verification")

    def _split(self) -> None:
        """Decide which operators divide the compiled graph, and what that does to the mode."""
        if self.compile != 3:
            self.splitting = [] if self.splitting is None else self.splitting
        elif self.fuse_attention and not self.partition:
            if self.splitting is None:
                self.splitting = []
                if self.mode.has_piecewise:
                    self.set_mode("fused-attention", GraphMode.FULL, "attention is compiled with the rest")
            if self.splits_attention():
                message = "vLLM cannot fuse attention that is split off"
                raise refusal(COMPILATION, message, "drop one of both", "splitting_ops")
        elif self.splitting is None:
            # Also for FULL: the pieces stay, as they cost less host time where a batch has no graph (vllm#20059).
            self.splitting = [*names()["attention_ops"]]
        elif not self.splitting:
            after = {GraphMode.PIECEWISE: GraphMode.NONE, GraphMode.FULL_AND_PIECEWISE: GraphMode.FULL}
            self.set_mode("nothing-split", after.get(self.mode, self.mode), "no operator divides the graph")
        ranks = self.data if self.model.experts else 1  # replicas without experts exchange nothing
        # DeepEP's high-throughput kernels are made for prefills; pieces around them are an open question (vllm#25093).
        if self.compile == 3 and self.all2all == "deepep_high_throughput" and ranks > 1:
            self.set_mode("deepep", GraphMode.NONE, "DeepEP's high-throughput kernels are not captured")

    def _load_draft(self) -> None:
        """Repeat the rewrites, from what they left, for each copy made to load a draft: it shares graph settings."""
        spec = self.spec
        if spec is None or not spec.has_draft_cache:
            return
        independent, copies = spec.method == "draft_model", spec.copies
        if self.runner is RunnerVersion.V1:
            # V1 sets the backend in a copy, given or not.
            copies += spec.backend is None
        elif independent or spec.drafter is DrafterKind.PARALLEL:
            copies = 0 if independent else 1
        for _ in range(copies):
            self._rewrite_again()
        if independent:
            # An independent draft's ranks overlap nothing, so its copy may choose V2 where the target has V1.
            runner, overlaps, self.ubatching = self.runner, self.ubatching, False
            if self.line.variables.get(_V2) is None and not self._missing_in_v2():
                self.runner = RunnerVersion.V2
            self._rewrite_again(of_target=False)
            self.runner, self.ubatching = runner, overlaps

    def _rewrite_again(self, *, of_target: bool = True) -> None:
        # In a copy, what the first pass has resolved counts as given.
        self.user_sizes, self.user_max = list(self.sizes), self.max_size
        self._schedule_without_full()
        self._limit_modes(of_target=of_target)
        self._sizes()
        self._last_rewrites()

    @property
    def captures_pieces(self) -> bool:
        """Whether anything is captured piecewise."""
        return self.breakable or self.compile == 3

    def splits_attention(self) -> bool:
        return self.splitting is not None and all(op in self.splitting for op in names()["attention_ops"])

    @property
    def compiles_around_attention(self) -> bool:
        """Whether compiled pieces end where attention begins, as model runner V1 requires."""
        if not self.splits_attention():
            return False
        return self.compiler == "inductor" and self.compile != 0 if self.partition else self.compile == 3
