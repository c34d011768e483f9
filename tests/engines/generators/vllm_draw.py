"""One drawn command line of vLLM."""

from __future__ import annotations

import json
import random
from typing import Any

_TARGETS = {
    **{"dense": 6, "short": 2, "moe": 2, "mla": 2, "oss": 1, "gemma": 1, "wide": 1, "hybrid": 1, "conv": 1},
    **{"chunked": 1, "quantized": 1, "float": 1, "vision": 1, "whisper": 1},
    **{"sparse": 1, "dsa": 1, "nemotron": 1, "mimo": 1},
}
_LATENT = ("mla", "sparse", "dsa")
_CACHES = ("auto", "fp8", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16", "nvfp4", "int8_per_token_head")
_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_BACKENDS = (
    *("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"),
    *("FLASH_ATTN_MLA", "FLASHINFER_MLA", "FLASHMLA", "TRITON_MLA", "CUTLASS_MLA"),
    *("auto", "flash_attn", "XFORMERS"),
)
_SPARSE = (
    *("FLASH_ATTN_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE_FA4", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE"),
    *("FLASHINFER_MLA_SPARSE_SM90", "FLASHINFER_MLA_SPARSE_SM120"),
)


class Draw:
    """Draws one command line; ``wild`` is how readily it draws what vLLM may refuse."""

    def __init__(self, random_: random.Random, wild: float) -> None:
        self.random, self.wild = random_, wild
        self.words: list[str] = []
        self.parts: dict[str, Any] = {}
        self.target = random_.choices(list(_TARGETS), list(_TARGETS.values()))[0]
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

    def encoder(self) -> None:
        """Ask for graphs of the encoder."""
        self.parts["cudagraph_mm_encoder"] = self.random.choice([True, True, True, "true", False])
        if self.often(0.3):
            sizes = [self.random.choice([1, 4, 64, 100, 512, 4096, 20000]) for _ in range(self.random.randint(1, 4))]
            self.parts["encoder_cudagraph_token_budgets"] = [0, *sizes] if self.often(self.wild) else sizes
        if self.often(0.3):
            self.parts["encoder_cudagraph_max_vision_items_per_batch"] = self.random.choice([0, 1, 2, 4, 80, 300, -1])
        if self.often(0.1):
            self.parts["encoder_cudagraph_max_frames_per_batch"] = self.random.choice([0, 8, -1])
        if self.often(0.05):
            self.flag("--language-model-only")

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
            self.parts["mode"] = self.random.choice([0, 1, 2, 3, "NONE", "vllm_compile", "STOCK_TORCH_COMPILE"])
        if self.often(0.08):
            self.parts["splitting_ops"] = self.random.choice([[], ["vllm::unified_attention_with_output"]])
        if self.often(0.08):
            self.parts["use_inductor_graph_partition"] = self.often(0.6)
        if self.often(0.08):
            self.parts["cudagraph_specialize_lora"] = self.often(0.3)
        if self.often(0.08):
            self.parts["backend"] = self.random.choice(["inductor", "eager", "", "openxla"])
        if self.often(0.5 if self.target == "vision" else 0.02):
            self.encoder()
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
            found = self.random.choice([[], [[2, 4, 1]], [[1, 8, 2], [4, 9, 1]], [[1, 0, 1]], [[1, 4]], [[1, 4, -1]]])
        return found

    def speculation(self) -> None:
        if not self.often(0.5):
            return
        self.speculates = True
        tokens = self.random.choice([1, 2, 3, 4, 5, 7, 15])
        config: dict[str, Any] = {"num_speculative_tokens": tokens}
        plain = ["ngram", "ngram_gpu", "eagle3", "eagle", "draft_model", "named", "suffix", "dflash", "dspark"]
        ways = plain * 2 + ["custom_class"] + ["mtp"] * (self.target in (*_LATENT, "nemotron")) * 14
        way = self.random.choice(ways)
        config["method"] = way
        if way in ("eagle", "eagle3"):
            config["model"] = "{models}/" + way
        elif way in ("draft_model", "named"):
            config["model"] = "{models}/" + self.random.choice(["draft", "eagle3"])
        elif way == "dflash":
            config["model"] = "{models}/" + self.random.choice(["dflash", "dflash", "causal"])
        elif way == "dspark":
            config["model"] = "{models}/" + self.random.choice(["dspark", "filling"])
            if self.often(0.2):
                del config["num_speculative_tokens"]
        elif way == "custom_class":
            config["model"] = "package.Proposer"
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
        if self.often(0.06):
            config["kv_cache_dtype"] = self.random.choice(_CACHES)
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
            names = {"method": "--spec-method", "model": "--spec-model", "num_speculative_tokens": "--spec-tokens"}
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
        if self.often(0.3 if self.target in ("moe", "oss", *_LATENT) else self.wild):
            self.flag(self.random.choice(["--enable-expert-parallel", "-ep"]))
        if self.often(0.08):
            backends = ["allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "naive"]
            self.flag("--all2all-backend", self.random.choice(backends))
        if self.often(0.04):
            self.flag(*([["--enable-dbo"]] * 4 + [["--ubatch-size", n] for n in (1, 2, 3)])[self.random.randrange(7)])
            if self.often(0.2):
                self.flag("--dbo-decode-token-threshold", self.random.choice([2, 4, 64]))
            if self.often(0.1):
                self.flag("--dbo-prefill-token-threshold", self.random.choice([2, 256]))
            if not self.often(self.wild * 3):
                self.flag("--all2all-backend", "deepep_low_latency")
        if self.often(0.1):
            self.flag(self.random.choice(["--async-scheduling", "--no-async-scheduling"]))

    def attention(self) -> None:
        if self.often(0.35):
            usable = {"mla": _BACKENDS[4:9], "sparse": _SPARSE, "dsa": _SPARSE}.get(self.target, _BACKENDS[:4])
            name = self.random.choice(_BACKENDS if self.often(self.wild * 3) else usable)
            if self.often(0.8):
                self.flag("--attention-backend", name)
            else:
                self.words += [self.random.choice(["-ac.backend", "--attention-config.backend"]), name]
        if self.often(0.06):
            self.words += ["--attention-config.flash_attn_version", self.random.choice("234")]
        if self.often(0.04):
            self.words += ["-ac.use_trtllm_attention", self.random.choice(["true", "false"])]

    def precision(self) -> None:
        if self.often(0.25):
            odd = ("fp4", "fp8_ds_mla", "octave_k3v4", "fp8_inc") * self.often(3 * self.wild)
            self.flag("--kv-cache-dtype", self.random.choice(_CACHES + odd))
        if self.often(0.12):
            self.flag("--block-size", self.random.choice([16, 32, 64, 128, 256] + [8] * self.often(self.wild)))
        if self.often(0.12):
            self.flag("--dtype", self.random.choice(["auto", "bfloat16", "float16", "half", "float32"]))
        if self.often(0.06):
            usual = ["fp8", "fp8", "mxfp8", "experts_int8", "humming", "fp8_per_block", "modelopt"]
            self.flag("--quantization", self.random.choice(usual + ["awq", "x"] * self.often(self.wild)))
        if self.often(0.1 + 0.2 * (self.target in ("hybrid", "conv", "nemotron"))):
            self.flag(self.random.choice(["--enable-prefix-caching", "--no-enable-prefix-caching"]))
            if self.often(0.1):
                self.flag("--mamba-block-size", self.random.choice([64, 2048, 4096]))
        if self.often(0.02):
            self.flag("--disable-sliding-window")
        if self.often(0.05):
            self.flag("--seed", self.random.randint(0, 9))

    def others(self) -> None:
        if self.often(0.06):
            self.flag("--runner", self.random.choice(["pooling", "generate", "auto"]))
        elif self.often(0.03):
            self.flag("--convert", self.random.choice(["embed", "classify", "none"]))
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
            self.precision,
            self.others,
        ]
        self.random.shuffle(steps)
        for step in steps:
            step()
        self.compilation()
        model = "{models}/" + self.target
        named = [["--model", model], [f"--model={model}"]]
        return tuple([*self.random.choice(named), *self.words] if self.often(0.2) else [model, *self.words])
