"""Command lines of vLLM over every flag that bears on graphs, valid and not, and batches for them.

A command names its models as ``{models}/dense``: ``write_models`` makes those folders, each with nothing
but a ``config.json``, and ``Case.command_in`` puts the folder in.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from capture_planner.engines.vllm.settings import Runner, VllmSettings
from capture_planner.entry import Batch
from capture_planner.modes import Role

ENVIRONMENTS = ("h100", "h200", "a100", "b200", "l40s", "t4")
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "max_position_embeddings": 32768,
        "vocab_size": 128256,
    },
    "short": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_hidden_layers": 28,
        "max_position_embeddings": 4096,
        "vocab_size": 128256,
    },
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
    },
    "mla": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 16384,
        "vocab_size": 129280,
    },
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    },
    "eagle": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "max_position_embeddings": 4096,
        "vocab_size": 128256,
    },
    "draft": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 16,
        "max_position_embeddings": 8192,
        "vocab_size": 128256,
    },
}
_TARGETS = ("dense", "short", "moe", "mla")
_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_BACKENDS = (
    "FLASH_ATTN",
    "FLASHINFER",
    "TRITON_ATTN",
    "FLEX_ATTENTION",
    "FLASH_ATTN_MLA",
    "FLASHINFER_MLA",
    "FLASHMLA",
    "TRITON_MLA",
    "CUTLASS_MLA",
    "auto",
    "flash_attn",
    "XFORMERS",
)


def write_models(folder: Path) -> None:
    """Write the models' folders that the commands name."""
    for name, config in MODELS.items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))


@attrs.frozen(kw_only=True)
class Case:
    """One command line on one machine."""

    command: tuple[str, ...]
    environment: str
    variables: tuple[tuple[str, str], ...] = ()
    file: str = ""
    """What ``{models}/flags.yaml`` holds, where the command names it."""

    def command_in(self, folder: Path) -> list[str]:
        """Return the words with the models' folder in place, and write the file that they name."""
        if self.file:
            (folder / "flags.yaml").write_text(self.file.replace("{models}", str(folder)))
        return [word.replace("{models}", str(folder)) for word in self.command]

    def data(self) -> dict[str, Any]:
        """Return the case as JSON has it."""
        found: dict[str, Any] = {"command": list(self.command), "environment": self.environment}
        if self.file:
            found["file"] = self.file
        return found | ({"variables": dict(self.variables)} if self.variables else {})

    @classmethod
    def of(cls, data: dict[str, Any]) -> Case:
        """Return the case that ``data`` was written from."""
        variables = tuple(data.get("variables", {}).items())
        return cls(
            command=tuple(data["command"]),
            environment=data["environment"],
            variables=variables,
            file=data.get("file", ""),
        )


class _Draw:
    """Draws one command line; ``wild`` is how readily it draws what vLLM may refuse."""

    def __init__(self, random_: random.Random, wild: float) -> None:
        self.random, self.wild = random_, wild
        self.words: list[str] = []
        self.parts: dict[str, Any] = {}
        self.target = random_.choices(_TARGETS, (6, 2, 2, 2))[0]
        self.speculates = False

    def often(self, chance: float) -> bool:
        return self.random.random() < chance

    def flag(self, name: str, *values: Any) -> None:
        """Write a flag in one of the ways that vLLM reads."""
        texts = [str(value) for value in values]
        if self.often(0.1) and name.startswith("--"):
            name = "--" + name[2:].replace("-", "_")
        if len(texts) == 1 and name.startswith("--") and self.often(0.3):
            self.words.append(f"{name}={texts[0]}")
        else:
            self.words += [name, *texts]

    def count(self, *usual: int) -> int:
        if self.often(0.5):
            return self.random.choice(usual)
        return self.random.randint(1, max(usual))

    def budgets(self) -> None:
        if self.often(0.6):
            self.flag("--max-num-seqs", self.count(1, 2, 8, 16, 64, 100, 128, 256, 512, 1024))
        if self.often(0.5):
            tokens = self.random.choice(
                [self.count(16, 100, 256, 512, 1000, 2048, 8192, 16384), "2k", "8K", "4k", "1.5k"]
            )
            self.flag("--max-num-batched-tokens", tokens)
        if self.often(0.3):
            self.flag("--max-model-len", self.random.choice([64, 128, 1024, 2048, 4096, "2k", "auto", -1]))
        elif self.often(self.wild):
            self.flag("--max-model-len", self.random.choice([10**6, 0, "1.5K", "x"]))
        if self.often(0.15):
            self.flag(
                self.random.choice(
                    ["--enable-chunked-prefill", "--no-enable-chunked-prefill", "--disable-chunked-prefill"]
                )
            )
        if self.often(0.05):
            self.flag("--max-num-active-seqs", self.count(1, 8, 256))
        if self.often(0.15):
            self.flag("--performance-mode", self.random.choice(["balanced", "interactivity", "throughput"]))

    def sizes(self) -> list[int]:
        if self.often(0.4):
            sizes = [1 << n for n in range(self.random.randint(1, 11))]
        else:
            top = self.random.choice([8, 64, 300, 1024, 3000])
            sizes = [self.random.randint(1, top) for _ in range(self.random.randint(1, 12))]
        if self.often(0.2):
            self.random.shuffle(sizes)
        return sizes + ([sizes[0]] if self.often(0.1) else [])

    def capture(self) -> None:
        sizes = self.sizes() if self.often(0.25) else None
        if sizes is not None:
            if self.often(0.5):
                self.flag("--cudagraph-capture-sizes", *sizes)
            else:
                self.parts["cudagraph_capture_sizes"] = sizes
        if self.often(0.15):
            top = max(sizes) if sizes and self.often(0.6) else self.count(1, 8, 100, 256, 1024, 2048)
            if self.often(0.5):
                self.flag("--max-cudagraph-capture-size", top)
            else:
                self.parts["max_cudagraph_capture_size"] = top
        if self.often(0.5):
            mode = self.random.choice(_MODES)
            self.parts["cudagraph_mode"] = mode.lower() if self.often(0.2) else mode
        if self.often(0.15):
            self.parts["mode"] = self.random.choice(
                [0, 1, 2, 3, "NONE", "vllm_compile", "STOCK_TORCH_COMPILE"]
            )
        if self.often(0.08):
            self.parts["splitting_ops"] = self.random.choice([[], ["vllm::unified_attention_with_output"]])
        if self.often(0.08):
            self.parts["use_inductor_graph_partition"] = self.often(0.6)
        if self.often(0.08):
            self.parts["cudagraph_specialize_lora"] = self.often(0.3)
        if self.often(0.08):
            self.parts["backend"] = self.random.choice(["inductor", "eager", "", "openxla"])
        if self.often(0.06):
            self.parts["pass_config"] = {"fuse_attn_quant": self.often(0.7)}
        if self.often(self.wild):
            self.parts |= self.random.choice(
                [
                    {"cudagraph_mode": "FULLEST"},
                    {"cudagraph_sizes": [1, 2]},
                    {"cudagraph_capture_sizes": []},
                    {"max_cudagraph_capture_size": 0},
                    {"mode": 7},
                    {"cudagraph_capture_sizes": "many"},
                ]
            )

    def levels(self) -> None:
        if self.often(0.2):
            level = self.random.choice("0123" if not self.often(self.wild) else "45x")
            self.words += self.random.choice(
                [[f"-O{level}"], ["-O", level], [f"-O={level}"], ["--optimization-level", level]]
            )
        if self.often(0.08):
            self.flag("--enforce-eager")

    def schedule(self, tokens: int) -> list[list[int]]:
        found: list[list[int]] = []
        start = 1
        for _ in range(self.random.randint(1, 4)):
            end = start + self.random.choice([0, 3, 15, 63, 255])
            found.append([start, end, self.random.randint(0, tokens + 1)])
            start = end + self.random.choice([1, 1, 1, 9])
        if self.often(self.wild):
            found = self.random.choice(
                [[], [[2, 4, 1]], [[1, 8, 2], [4, 9, 1]], [[1, 0, 1]], [[1, 4]], [[1, 4, -1]]]
            )
        return found

    def speculation(self) -> None:
        if not self.often(0.5):
            return
        self.speculates = True
        tokens = self.random.choice([1, 2, 3, 4, 5, 7, 15])
        config: dict[str, Any] = {"num_speculative_tokens": tokens}
        ways = ["ngram", "ngram_gpu", "eagle3", "eagle", "draft_model", "named"] + ["mtp"] * (
            self.target == "mla"
        ) * 6
        way = self.random.choice(ways)
        config["method"] = way
        if way in ("eagle", "eagle3"):
            config["model"] = "{models}/" + way
        elif way in ("draft_model", "named"):
            config["model"] = "{models}/" + self.random.choice(["draft", "eagle3"])
        if way == "named":
            del config["method"]
        if self.often(0.3):
            config["num_speculative_tokens_per_batch_size"] = self.schedule(tokens)
        if self.often(0.1):
            config["attention_backend"] = self.random.choice(_BACKENDS[:4])
        if self.often(0.08):
            config["enable_adaptive_verification"] = True
        if self.often(0.08):
            config["disable_padded_drafter_batch"] = True
        if self.often(0.06):
            config["parallel_drafting"] = True
        if self.often(0.08):
            config["draft_tensor_parallel_size"] = self.random.choice([1, 2])
        if self.often(self.wild):
            config |= self.random.choice(
                [
                    {"num_speculative_tokens": 0},
                    {"method": "guess"},
                    {"draft_model": "x"},
                    {"prompt_lookup_max": 2, "prompt_lookup_min": 3},
                    {"tensor_parallel_size": 2},
                    {"num_speculative_tokens": None},
                ]
            )
        if self.often(0.08):
            names = {
                "method": "--spec-method",
                "model": "--spec-model",
                "num_speculative_tokens": "--spec-tokens",
            }
            for key, name in names.items():
                if key in config and self.often(0.7):
                    value = config[key] if self.often(self.wild) else config.pop(key)
                    self.flag(name, value)
            if not config:
                return
        if self.often(0.2):
            for key, value in config.items():
                self.words += [f"-sc.{key}", value if isinstance(value, str) else json.dumps(value)]
        else:
            self.words += [self.random.choice(["--speculative-config", "-sc"]), json.dumps(config)]

    def lora(self) -> None:
        if self.often(0.2):
            self.flag("--enable-lora")
            if self.often(0.5):
                self.flag("--max-loras", self.random.choice([1, 2, 3, 4, 7, 8, 16]))
            if self.often(0.4):
                self.flag(self.random.choice(["--specialize-active-lora", "--no-specialize-active-lora"]))
            if self.often(0.1):
                self.flag("--max-cpu-loras", self.random.choice([1, 8, 32]))

    def parallel(self) -> None:
        if self.often(0.25):
            self.flag(self.random.choice(["--data-parallel-size", "-dp"]), self.random.choice([1, 2, 4, 8]))
        if self.often(0.25):
            self.flag(
                self.random.choice(["--tensor-parallel-size", "-tp"]),
                self.random.choice([1, 2, 4, 8, 16] + [3] * self.often(self.wild)),
            )
        if self.often(0.08):
            self.flag(self.random.choice(["--pipeline-parallel-size", "-pp"]), self.random.choice([1, 2]))
        if self.often(0.04):
            self.flag("-dcp", self.random.choice([1, 2, 4]))
        if self.often(0.3 if self.target in ("moe", "mla") else self.wild):
            self.flag(self.random.choice(["--enable-expert-parallel", "-ep"]))
        if self.often(0.08):
            backends = ["allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "naive"]
            self.flag("--all2all-backend", self.random.choice(backends))
        if self.often(0.04):
            self.flag("--enable-dbo")
            if not self.often(self.wild * 3):
                self.flag("--all2all-backend", "deepep_low_latency")
        if self.often(0.1):
            self.flag(self.random.choice(["--async-scheduling", "--no-async-scheduling"]))

    def attention(self) -> None:
        if self.often(0.35):
            usable = _BACKENDS[4:9] if self.target == "mla" else _BACKENDS[:4]
            name = self.random.choice(_BACKENDS if self.often(self.wild * 3) else usable)
            if self.often(0.8):
                self.flag("--attention-backend", name)
            else:
                self.words += [self.random.choice(["-ac.backend", "--attention-config.backend"]), name]
        if self.often(0.06):
            self.words += ["--attention-config.flash_attn_version", self.random.choice("234")]
        if self.often(0.04):
            self.words += ["-ac.use_trtllm_attention", self.random.choice(["true", "false"])]

    def others(self) -> None:
        if self.often(0.06):
            self.flag("--runner", self.random.choice(["pooling", "generate", "auto"]))
        if self.often(0.1):
            self.flag("--gpu-memory-utilization", self.random.choice([0.5, 0.9]))
        if self.often(0.1):
            self.flag("--port", 8000)
        if self.often(0.05):
            self.flag("--served-model-name", "a", "b")
        if self.often(0.05):
            role = self.random.choice(["kv_both", "kv_producer"])
            connector = self.random.choice(["NixlConnector", "LMCacheConnectorV1", "OffloadingConnector"])
            config: dict[str, Any] = {"kv_connector": connector, "kv_role": role}
            if connector.startswith("LMC"):
                config["kv_connector_extra_config"] = {"use_layerwise": self.often(0.6)}
            self.flag("--kv-transfer-config", json.dumps(config))
        if self.often(self.wild):
            self.words += self.random.choice(
                [
                    ["--max-num-sequences", "4"],
                    ["--max-num-seqs", "many"],
                    ["--max-num-seqs", "0"],
                    ["-cc", "{"],
                    ["-cc", "3"],
                    ["--speculative-config", "{'method': 'ngram'}"],
                    ["--runner", "walking"],
                    ["extra"],
                    ["--max-num-batched-tokens", "1.5K"],
                ]
            )

    def compilation(self) -> None:
        if not self.parts:
            return
        name = self.random.choice(["-cc", "--compilation-config"])
        if self.often(0.5):
            for key, value in self.parts.items():
                text = value if isinstance(value, str) else json.dumps(value)
                self.words += [f"{name}.{key}={text}"] if self.often(0.7) else [f"{name}.{key}", text]
        else:
            self.words += [name, json.dumps(self.parts)]

    def config_file(self) -> str:
        """Return a YAML file of flags, in some of the ways that people write one."""
        lines = ["# drawn"]
        if self.often(0.6):
            lines.append(f"max-num-seqs: {self.count(8, 64, 256)}")
        if self.often(0.4):
            lines.append(f"max_num_batched_tokens: {self.random.choice([2048, 4096, '8k'])}")
        if self.often(0.4):
            lines.append(f"compilation-config: {{cudagraph_mode: {self.random.choice(_MODES)}}}")
        if self.often(0.3):
            sizes = "".join(f"\n  - {size}" for size in self.sizes())
            lines.append(f"cudagraph-capture-sizes:{sizes}")
        if self.often(0.3):
            lines.append(f"enforce-eager: {self.random.choice(['true', 'false', 'no', 'on'])}")
        if self.often(0.3):
            lines.append(f"enable-chunked-prefill: {self.random.choice(['true', 'false'])}")
        if self.often(0.3):
            lines.append("speculative-config:\n  method: ngram\n  num_speculative_tokens: 3")
        if self.often(self.wild):
            lines.append(self.random.choice(["no-such-flag: 3", "- a list", "max-num-seqs: {"]))
        return "\n".join(lines) + "\n"

    def command(self) -> tuple[str, ...]:
        steps = [
            self.budgets,
            self.capture,
            self.levels,
            self.speculation,
            self.lora,
            self.parallel,
            self.attention,
            self.others,
        ]
        self.random.shuffle(steps)
        for step in steps:
            step()
        self.compilation()
        model = "{models}/" + self.target
        named = [["--model", model], [f"--model={model}"]]
        return tuple([*self.random.choice(named), *self.words] if self.often(0.2) else [model, *self.words])


def cases(count: int, seed: int, wild: float = 0.03) -> Iterator[Case]:
    """Yield ``count`` command lines; the same seed yields the same lines."""
    random_ = random.Random(seed)
    for _ in range(count):
        drawn = _Draw(random_, wild)
        command = drawn.command()
        variables: list[tuple[str, str]] = []
        if random_.random() < 0.12:
            variables.append(("VLLM_USE_V2_MODEL_RUNNER", random_.choice("01")))
        if random_.random() < 0.05:
            variables.append(("VLLM_USE_BREAKABLE_CUDAGRAPH", random_.choice("01")))
        file = ""
        if random_.random() < 0.06:
            file = drawn.config_file()
            place = random_.randint(1, len(command)) if command[0].startswith("{models}") else len(command)
            # Not between a flag and its value: argparse would read --config as the value.
            place = place if place == len(command) or command[place].startswith("-") else len(command)
            command = (*command[:place], "--config", "{models}/flags.yaml", *command[place:])
        yield Case(
            command=command, environment=random_.choice(ENVIRONMENTS), variables=tuple(variables), file=file
        )


def batches(
    count: int,
    seed: int,
    *,
    roles: Sequence[Role],
    max_num_reqs: int,
    max_num_tokens: int,
    query_lens: Sequence[int],
    max_loras: int = 0,
) -> Iterator[Batch]:
    """Yield ``count`` batches that such an engine can be asked about; decodes and prefills in all sizes."""
    random_ = random.Random(seed)
    for _ in range(count):
        role = random_.choice(list(roles))
        reqs = random_.randint(1, max_num_reqs)
        query_len: int | None = random_.choice([*query_lens, 1])
        tokens = reqs * (query_len or 1)
        past_prompt = random_.random() < 0.8
        if random_.random() < 0.4 or tokens > max_num_tokens:
            reqs = min(reqs, max_num_tokens)
            tokens = random_.randint(reqs, max_num_tokens)
            query_len = tokens if reqs == 1 else None
            past_prompt = past_prompt and query_len is not None
        loras = random_.randint(0, max_loras + 1) if max_loras else 0
        yield Batch(
            role=role,
            num_reqs=reqs,
            num_tokens=tokens,
            query_len=query_len,
            past_prompt=past_prompt,
            active_loras=loras,
        )


def answer_of(settings: VllmSettings) -> dict[str, Any]:
    """Return settings in the form in which the engine's own answers are recorded."""
    draft: list[list[Any]] | None = []
    if settings.runner is Runner.V1:
        draft = None
    elif settings.draft_prefill_mode is not None:
        draft = [[settings.query_len, settings.draft_prefill_mode.value]]
        if settings.draft_decode_mode is not None:
            draft.append([1, settings.draft_decode_mode.value])
    return {
        "runner": settings.runner.value,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_model_len": settings.max_model_len,
        "K": settings.num_speculative_tokens,
        "configured": settings.configured_mode.value,
        "compile": settings.compilation,
        "async": settings.async_scheduling,
        "method": settings.method,
        "schedule": None if settings.schedule is None else [list(entry) for entry in settings.schedule],
        "lora_cases": list(settings.lora_cases),
        "backend": settings.backend,
        "varlen": settings.varlen,
        "mode": settings.mode.value,
        "draft": draft,
        "sizes": list(settings.sizes),
        "max_size": settings.max_size,
    }
