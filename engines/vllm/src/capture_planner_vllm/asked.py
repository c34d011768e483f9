"""What vLLM's flags ask for, checked one by one: graphs, model, ranks, budgets, adapters."""

from __future__ import annotations

from typing import Any

from capture_planner.engines.emulation import Decisions
from capture_planner.modes import GraphMode
from capture_planner.planning.sizing.engine_lists import GiB
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner_vllm import precision
from capture_planner_vllm.attention import FLAG as BACKEND_FLAG
from capture_planner_vllm.attention import backend_name
from capture_planner_vllm.bounds import check_bounds, check_compilation, check_ranks
from capture_planner_vllm.connector import check_connector
from capture_planner_vllm.flags import Given, refusal
from capture_planner_vllm.model import DEFAULT_MODEL, Model, read_model
from capture_planner_vllm.parts import ALL_MODES, COMPILE, Part, names, whole_number
from capture_planner_vllm.speculation import speculation
from capture_planner_vllm.unemulated import unemulated

COMPILATION = "--compilation-config"
GRID = "cudagraph_capture_sizes"


class Flags:
    """The flags of one command line; its attributes are what vLLM's own configuration objects start with."""

    asked_sizes: list[int] | None
    asked_max: int | None
    splitting: list[str] | None
    asked_compiled: list[int | str]
    specialize: bool = False
    """``--specialize-active-lora`` beside ``--enable-lora``."""

    def __init__(self, given: Given, environment: Environment) -> None:
        self.given, self.environment = given, environment
        self.decisions = Decisions()
        self.note = self.decisions.note
        self.sources: dict[str, str] = {}
        if environment.device.kind is not DeviceKind.CUDA:
            raise refusal(
                "--environment", f"{environment.name} has no CUDA device", "name a GPU's environment"
            )
        self._parts()
        self._model()
        self._parallel()
        self.spec = speculation(given, self.model, self.tensor, self.max_model_len)
        check_bounds(given, self.max_model_len)
        self._budgets()
        self._adapters()

    def _parts(self) -> None:
        given = self.given
        # Each value is checked where a flag is given twice; the last one counts.
        for value in (*given.overridden.get("compilation_config", ()), given.get("compilation_config")):
            self._graphs(value)
        self.asked_sizes = self._once("cudagraph_capture_sizes", self.asked_sizes)
        self.asked_max = self._once("max_cudagraph_capture_size", self.asked_max)
        self.listed_sizes = tuple(self.asked_sizes or ())
        for value in (*given.overridden.get("attention_config", ()), given.get("attention_config")):
            self._attention(value)
        asked = given.get("attention_backend")
        if asked is not None and self.inner_backend is not None:
            raise refusal(
                BACKEND_FLAG, "vLLM takes one backend, and --attention-config gives one too", "drop one"
            )
        self.backend = self.inner_backend if asked is None else backend_name(BACKEND_FLAG, asked)
        level = given.get("optimization_level", "2")
        number = whole_number(level)
        if number not in (0, 1, 2, 3):
            raise refusal("--optimization-level", f"vLLM has no level {level}", "give 0, 1, 2 or 3")
        self.level = number
        self.performance = given.get("performance_mode", "balanced")

    def _once(self, flag: str, inside: Any) -> Any:
        """Return the value of a flag that may stand in ``--compilation-config`` too, but not in both."""
        given, value = self.given, self.given.get(flag)
        if value is not None and inside is not None:
            says = f"vLLM takes it once, and {COMPILATION} gives {flag} too"
            raise refusal(f"--{flag.replace('_', '-')}", says, "drop one of both")
        self.sources[flag] = given.source(flag if flag in given.values else "compilation_config")
        return inside if value is None else value

    def _graphs(self, value: dict[str, Any] | None) -> None:
        cc = Part(COMPILATION, "compilation_config", value)
        check_compilation(cc)
        requested = cc.one_of("cudagraph_mode", ALL_MODES, 3)
        self.asked_mode = None if requested is None else GraphMode(requested)
        compile_ = cc.one_of("mode", COMPILE, 4)
        self.compile = None if compile_ is None else COMPILE.index(compile_)
        self.asked_sizes = cc.integers("cudagraph_capture_sizes")
        self.asked_max = cc.integer("max_cudagraph_capture_size")
        self.splitting = cc.given.get("splitting_ops")
        if self.splitting is not None and not isinstance(self.splitting, list):
            raise cc.refuse("splitting_ops", "vLLM wants a list of operators", "as in []")
        self.asked_compiled = self._compile_sizes(cc)
        self.partition = cc.boolean("use_inductor_graph_partition", False) or False
        self.separate_lora = cc.boolean("cudagraph_specialize_lora", True) or False
        self.compiler = cc.text("backend") or "inductor"
        if self.compile == 3 and self.compiler not in ("eager", "inductor"):
            raise cc.refuse(
                "backend", f"vLLM compiles in pieces with eager or inductor, not {self.compiler}", ""
            )
        inner = cc.given.get("pass_config")
        if inner is not None and not isinstance(inner, dict):
            raise cc.refuse("pass_config", "vLLM wants an object", "")
        self.fuse_attention = (
            Part(COMPILATION, "pass_config", inner).boolean("fuse_attn_quant", False) or False
        )

    @staticmethod
    def _compile_sizes(cc: Part) -> list[int | str]:
        """Return the sizes to compile for, in tokens; ``GRID`` stands for all sizes of graphs."""
        value = cc.given.get("compile_sizes")
        if value is None:
            return []
        found: list[int | str] = []
        for item in value if isinstance(value, list) else [None]:
            size = item if isinstance(item, str) else whole_number(item)
            if size is None or (isinstance(size, str) and size != GRID):
                says = f"vLLM wants a list of whole numbers or {GRID}, got {value!r}"
                raise cc.refuse("compile_sizes", says, "as in [1, 2, 4]")
            found.append(size)
        return found

    def _attention(self, value: dict[str, Any] | None) -> None:
        ac = Part("--attention-config", "attention_config", value)
        self.inner_backend = backend_name("--attention-config", ac.text("backend"))
        self.flash_attn = ac.integer("flash_attn_version")
        if self.flash_attn not in (None, 2, 3, 4) or isinstance(ac.given.get("flash_attn_version"), str):
            raise ac.refuse(
                "flash_attn_version",
                f"vLLM has no version {ac.given['flash_attn_version']!r}",
                "give 2, 3 or 4",
            )
        self.trtllm = ac.boolean("use_trtllm_attention")

    def _model(self) -> None:
        given = self.given
        self.model: Model = read_model("--model", given.model or DEFAULT_MODEL)
        unemulated(given, self.model)
        asked = given.get("max_model_len")
        if asked is not None and asked != -1:
            if asked <= 0:
                raise refusal(
                    "--max-model-len", f"vLLM wants a positive length, got {asked}", "give 1 or more"
                )
            if self.model.known and asked > self.model.limit:
                raise refusal(
                    "--max-model-len",
                    f"vLLM refuses {asked}: the model is made for {self.model.limit}",
                    f"give at most {self.model.limit}",
                )
        self.max_model_len = self.model.max_len if asked in (None, -1) else asked
        self.sources["max_model_len"] = given.source("max_model_len") if asked else self.model.source
        converts = given.get("convert") in ("embed", "classify")
        runner = given.get("runner", "auto")
        self.pooling = runner == "pooling" or (runner == "auto" and converts)
        self.eager = bool(given.get("enforce_eager", False))
        capability = self.environment.device.sm
        self.dtype = precision.dtype(given, self.model, capability, pooling=self.pooling)
        precision.quantization(given, self.model, self.dtype, capability)
        self.cache = precision.cache_dtype(given, self.model, self.dtype)
        self.block = precision.block_size(given)

    def _parallel(self) -> None:
        get = self.given.get
        self.tensor, self.data = get("tensor_parallel_size", 1), get("data_parallel_size", 1)
        self.pipeline = get("pipeline_parallel_size", 1)
        self.decode_context = get("decode_context_parallel_size", 1)
        self.expert = bool(get("enable_expert_parallel", False))
        self.all2all = get("all2all_backend", "allgather_reducescatter")
        self._overlap()
        for name in ("tensor", "data", "pipeline", "decode_context"):
            if getattr(self, name) < 1:
                raise refusal(
                    f"--{name.replace('_', '-')}-parallel-size", "vLLM wants at least 1", "give 1 or more"
                )
        if self.tensor % self.decode_context:
            raise refusal(
                "--decode-context-parallel-size",
                f"vLLM wants {self.tensor} tensor-parallel ranks to be a multiple of {self.decode_context}",
                "give a divisor",
            )
        model = self.model
        if model.heads % self.tensor:
            raise refusal(
                "--tensor-parallel-size",
                f"vLLM cannot split {model.heads} heads over {self.tensor}",
                "give a divisor",
            )
        if self.pipeline > 1 and model.architecture in names()["no_pipeline"]:
            raise refusal("--pipeline-parallel-size", "vLLM cuts this model into no stages", "give 1")
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
        check_ranks(self.given, model, data=self.data, ranks=self.data * self.tensor)
        transfer = self.given.get("kv_transfer_config")
        self.connector: dict[str, Any] = transfer or {}
        if transfer is not None:
            check_connector(transfer)
        split = self.decode_context > 1
        odd = split and (self.decode_context != self.tensor or not model.mla)
        if odd and self.connector.get("kv_connector") == "NixlConnector":
            raise refusal("--decode-context-parallel-size", "vLLM's NIXL connector takes 1 here", "give 1")

    def _overlap(self) -> None:
        get = self.given.get
        both, size = bool(get("enable_dbo", False)), get("ubatch_size", 0)
        self.ubatching, count = both or size > 1, 2 if both else size
        for name, usual in (("decode", 32), ("prefill", 512)):
            flag = f"dbo_{name}_token_threshold"
            least = count if self.ubatching else 0
            if get(flag, usual) < least:
                reason = f"vLLM splits batches of {least} tokens or more, got {get(flag, usual)}"
                raise refusal(f"--{flag.replace('_', '-')}", reason, f"give {least} or more")
        if size < 0:
            raise refusal("--ubatch-size", f"vLLM wants at least 0, got {size}", "leave it out")

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
        if not chunked and self.model.recurrent and given.get("enable_prefix_caching", True):
            reason = "vLLM caches no prefixes of recurrent layers without it"
            raise refusal("--enable-chunked-prefill", reason, "give --no-enable-prefix-caching too")
        if not chunked:
            tokens = max(tokens, self.max_model_len)
        self.sources["max_num_batched_tokens"] = given.source("max_num_batched_tokens")
        self.sources["max_num_seqs"] = given.source("max_num_seqs")
        if asked_tokens is not None:
            tokens = asked_tokens
        elif tokens > seqs * self.max_model_len:
            most, rule = seqs * self.max_model_len, "tokens-by-requests"
            says = f"{seqs} requests of {self.max_model_len} tokens have no more than {most}"
            self.note(rule, tokens, most, says)
            self.sources["max_num_batched_tokens"], tokens = rule, most
        if asked_seqs is None and seqs > tokens:
            rule = "requests-by-tokens"
            self.note(rule, seqs, tokens, f"a batch of {tokens} tokens has no more requests")
            self.sources["max_num_seqs"], seqs = rule, tokens
        self.tokens, self.seqs = tokens, seqs
        if seqs < 1:
            raise refusal("--max-num-seqs", f"vLLM wants at least 1, got {seqs}", "give 1 or more")
        if tokens < 1:
            raise refusal(
                "--max-num-batched-tokens", f"vLLM wants at least 1, got {tokens}", "give 1 or more"
            )
        if tokens < self.max_model_len and (not chunked or self.model.encoder_decoder):
            # Only a length that no flag gives is the model's.
            refuse = refusal if given.get("max_model_len") not in (None, -1) else self.model.refusal
            raise refuse(
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
        if active is not None and not 1 <= active <= seqs:
            reason = f"vLLM takes 1 to {seqs}, got {active}"
            raise refusal("--max-num-active-seqs", reason, "give one of these")

    def _adapters(self) -> None:
        given = self.given
        self.max_loras = 0
        if not given.get("enable_lora", False):
            return
        self.max_loras = given.get("max_loras", 1)
        self.specialize = bool(given.get("specialize_active_lora", False))
        if self.model.architecture in names()["no_lora"]:
            raise refusal("--enable-lora", "vLLM has no adapters for this model", "leave it out")
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
