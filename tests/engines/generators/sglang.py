"""Seeded command lines of SGLang and batches for them: for goldens and for comparison with the engine.

``case(random)`` draws one. Paths are placeholders, ``MODEL`` and ``CONFIG``, that ``written`` replaces by
real files, so that a case can be kept in a repository.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import attrs
from ruamel.yaml import YAML

from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.records.environment import Device, DeviceKind, Environment
from engines.generators.sglang_families import HYBRID, SPARSE, VISION, draw_family, draw_overlap, with_family
from engines.generators.sglang_latent import LATENT, draw_latent, with_latent_attention, without_whole_prefills

DEVICES: dict[str, tuple[str, int]] = {
    "t4": ("7.5", 16),
    "rtx-4090": ("8.9", 24),
    "rtx-5090": ("12.0", 32),
    "a100-40": ("8.0", 40),
    "h100": ("9.0", 79),
    "h200": ("9.0", 140),
    "b200": ("10.0", 179),
    "h20": ("9.0", 95),
    "l4": ("8.9", 22),
    "l40": ("8.9", 44),
    "a10": ("8.6", 22),
    "b300": ("10.3", 268),
    "gb10": ("12.1", 119),
    "rtx-pro-6000": ("12.0", 95),
    "tier-20": ("8.9", 20),
    "tier-35": ("8.6", 35),
    "tier-60": ("9.0", 60),
    "tier-160": ("10.0", 160),
}
"""Compute capability and memory in GiB; the last ones are where a rule by memory changes."""

MODELS: dict[str, tuple[str, int]] = {
    "llama-2-7b": ("LlamaForCausalLM", 4096),
    "llama-3": ("LlamaForCausalLM", 131072),
    "qwen": ("Qwen2ForCausalLM", 32768),
    "small": ("MistralForCausalLM", 2048),
    "glm": ("Glm4MoeForCausalLM", 131072),
    "deepseek-v2": ("DeepseekV2ForCausalLM", 163840),
    "deepseek-v3": ("DeepseekV3ForCausalLM", 163840),
    "kimi": ("KimiK25ForConditionalGeneration", 8192),
    "glm-flash": ("Glm4MoeLiteForCausalLM", 202752),
    "gemma-3": ("Gemma3ForConditionalGeneration", 131072),
    "gemma-4": ("Gemma4ForConditionalGeneration", 262144),
    "glm-4.5v": ("Glm4vMoeForConditionalGeneration", 65536),
    "qwen2.5-vl": ("Qwen2_5_VLForConditionalGeneration", 128000),
    "qwen3-vl": ("Qwen3VLForConditionalGeneration", 262144),
    "qwen3-vl-moe": ("Qwen3VLMoeForConditionalGeneration", 262144),
    "qwen3-next": ("Qwen3NextForCausalLM", 262144),
    "qwen3.5": ("Qwen3_5ForConditionalGeneration", 262144),
    "qwen3.5-moe": ("Qwen3_5MoeForConditionalGeneration", 8192),
    "deepseek-v3.2": ("DeepseekV32ForCausalLM", 163840),
    "glm-5": ("GlmMoeDsaForCausalLM", 202752),
}
"""Architecture and longest sequence."""

_EAGLE = "--speculative-draft-model-path MODEL --speculative-algorithm"
_EVERY_LENGTH = '{"max_position_embeddings":512,"rope_scaling":null,"rope_parameters":null}'
_ONE_STEP = "--speculative-num-steps 1 --speculative-num-draft-tokens 2 --speculative-eagle-topk"
_BRANCH = "--speculative-num-steps 3 --speculative-num-draft-tokens 4 --speculative-eagle-topk"
PROBES = (
    ("t4", ""),
    ("rtx-5090", ""),
    ("a100-40", "--max-running-requests 64"),
    ("h100", ""),
    ("b200", ""),
    ("b200", "--attention-backend triton --page-size 16"),
    ("h100", "--attention-backend flashinfer --chunked-prefill-size 2048"),
    ("h100", "--tp-size 8 --attn-dp-size 4 --max-total-tokens 100000"),
    ("h100", "--cuda-graph-backend-prefill full --cuda-graph-backend-decode breakable"),
    ("b200", "--cuda-graph-backend-prefill full"),
    ("a100-40", "--pp-size 2 --cuda-graph-backend-prefill breakable --disaggregation-mode prefill"),
    ("h100", f"{_EAGLE} EAGLE"),
    ("b200", f"{_EAGLE} EAGLE3 --speculative-num-steps 2 --speculative-eagle-topk 1"),
)
"""Device and flags of launches that rules for single architectures meet."""


BOUNDARIES = (
    ("llama-3", "--tp-size 8 --attn-dp-size 8 --moe-dense-tp-size 1 --enable-dp-lm-head --moe-a2a-backend deepep"),
    ("llama-3", "--tp-size 8 --attn-dp-size 8 --moe-dense-tp-size 1 --max-running-requests 8"),
    ("llama-3", "--tp-size 4 --attn-dp-size 4 --chunked-prefill-size 2048 --cuda-graph-max-bs-prefill 512"),
    ("llama-3", "--tp-size 4"),
    ("llama-3", "--tp-size 3"),
    ("llama-3", "--chunked-prefill-size 0"),
    ("small", "--max-total-tokens 2"),
    ("small", "--max-total-tokens 64 --max-running-requests 32 --page-size 1"),
    ("small", "--max-running-requests 1 --cuda-graph-bs-prefill 1 2 4 --cuda-graph-bs-decode 1"),
    ("llama-3", "--pp-size 2 --cuda-graph-backend-prefill breakable --chunked-prefill-size 8192"),
    ("deepseek-v2", "--chunked-prefill-size 8192"),
    ("qwen3-vl", "--max-running-requests 512", "h200"),
    ("qwen3-vl-moe", "--max-running-requests 513 --cuda-graph-max-bs-decode 512", "h200"),
    ("qwen3.5", "--max-mamba-cache-size 1"),
    ("qwen3-next", "--max-mamba-cache-size 48 --max-running-requests 48"),
    ("llama-3", f"{_EAGLE} EAGLE3 --speculative-num-steps 1 --speculative-eagle-topk 1"),
    (
        "llama-3",
        f"{_EAGLE} EAGLE3 --speculative-num-steps 2 --speculative-eagle-topk 2 --speculative-num-draft-tokens 4",
    ),
    ("llama-3", "--speculative-algorithm NGRAM --speculative-num-draft-tokens 1"),
    ("llama-3", "--enable-lora --max-lora-rank 16 --lora-target-modules q_proj --max-loras-per-batch 1"),
    ("llama-3", '--cuda-graph-config {"prefill":{"backend":"full","full_prefill_max_req":1}}', "h100"),
    ("small", "--context-length 2048"),
    ("llama-3", "--attn-dp-size 1 --dp-size 2"),
    ("llama-3", "--speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 1 --page-size 16", "h100"),
    ("llama-3", f"{_EAGLE} EAGLE3 {_BRANCH} 1 --page-size 16 --attention-backend fa4", "b200"),
    ("llama-3", f"{_EAGLE} EAGLE3 {_BRANCH} 1 --speculative-draft-attention-backend trtllm_mha", "b200"),
    ("llama-3", f"{_EAGLE} EAGLE3 {_BRANCH} 1 --attention-backend trtllm_mha", "b200"),
    ("llama-3", f"{_EAGLE} EAGLE3 {_BRANCH} 2 --page-size 1 --attention-backend fa4", "h100"),
    ("llama-3", f"{_EAGLE} EAGLE3 {_BRANCH} 1 --page-size 16 --attention-backend fa4", "h100"),
    ("llama-3", f"{_EAGLE} EAGLE3 {_ONE_STEP} 0", "h100"),
    ("small", "--config CONFIG"),
    ("llama-3", "--cuda-graph-bs-prefill 100 1000 --chunked-prefill-size 1000 --page-size 1", "h100"),
    ("llama-3", '--cuda-graph-config {"prefill":{"max_seq_len":100,"bs":[10,100,1000]}}', "h100"),
    ("small", f"--json-model-override-args {_EVERY_LENGTH}"),
    ("deepseek-v3", "--attention-backend trtllm_mla", "b200"),
    ("deepseek-v3", f"{_EAGLE} EAGLE {_BRANCH} 1 --attention-backend flashmla", "h100"),
    ("deepseek-v3", f"{_EAGLE} EAGLE {_ONE_STEP} 2 --attention-backend flashmla", "h100"),
    ("qwen3-next", "--linear-attn-decode-backend flashinfer", "b200"),
    ("qwen3-next", "--disable-overlap-schedule --page-size 1 --max-mamba-cache-size 12", "h100"),
    ("qwen3-next", "--max-mamba-cache-size 5", "h100"),
    ("qwen3-next", f"{_EAGLE} NEXTN {_BRANCH} 1 --mamba-track-interval 4 --page-size 1", "h100"),
)
"""Model and flags at the values where a comparison of a rule changes its answer, and the device where it matters."""


@attrs.frozen(kw_only=True)
class Case:
    """One launch: its command with placeholders, the file of --config, and the machine."""

    command: tuple[str, ...]
    model: str
    device: str
    file: dict[str, Any] | None = None

    @property
    def environment(self) -> Environment:
        return environment(self.device)


def environment(name: str) -> Environment:
    """Return one of ``DEVICES`` as an environment."""
    capability, memory = DEVICES[name]
    device = Device(kind=DeviceKind.CUDA, name=name, capability=capability, memory=memory << 30, multiprocessors=100)
    return Environment(name=name, device=device)


def written(case: Case, folder: Path) -> list[str]:
    """Write the case's files into a folder and return its command with their paths."""
    model = folder / case.model
    if not model.exists():
        model_folder(model, *MODELS[case.model])
    paths = {"MODEL": str(model), "CONFIG": str(folder / "flags.yaml")}
    if case.file is not None:
        file = json.loads(json.dumps(case.file).replace('"MODEL"', json.dumps(paths["MODEL"])))
        with Path(paths["CONFIG"]).open("w") as stream:
            YAML(typ="safe", pure=True).dump(file, stream)
    return [paths.get(word, word) for word in case.command]


def model_folder(folder: Path, architecture: str, context: int) -> str:
    """Write a model's folder, of an ordinary decoder's numbers, and return its path."""
    folder.mkdir(parents=True)
    kinds = {"Qwen2ForCausalLM": "qwen2", "MistralForCausalLM": "mistral"}
    config = {
        "architectures": [architecture],
        "model_type": kinds.get(architecture, "llama"),
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
        "full_attention_interval": 4,
    }
    config = with_family(with_latent_attention(config))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def case(random: Random, index: int | None = None) -> Case:
    """Draw a launch: mostly of flags that fit each other, sometimes of such that do not.

    :param index: its place in a comparison, which begins with ``BOUNDARIES``.
    """
    if index is not None and index < len(BOUNDARIES):
        model, words, *device = BOUNDARIES[index]
        return Case(
            command=("--model-path", "MODEL", *words.split()),
            model=model,
            device=random.choice(device or [*DEVICES]),
            file={"max-running-requests": 4} if "CONFIG" in words else None,
        )
    flags: dict[str, list[str]] = {}

    def maybe(chance: float, flag: str, *values: Any) -> None:
        if random.random() < chance:
            flags[flag] = [str(value) for value in values]

    def pick(*values: Any) -> Any:
        return random.choice(values)

    _parallel(random, flags)
    maybe(0.4, "--max-running-requests", pick(1, 2, 3, 7, 16, 33, 48, 100, 256, 300, 512, 1000, 3000))
    maybe(0.15, "--max-total-tokens", pick(2, 10, 100, 1000, 4096, "8k", "100Ki", 1000000))
    maybe(0.25, "--chunked-prefill-size", pick(-1, 64, 512, 1024, 2048, 4096, 6016, 8192, 16384))
    maybe(0.1, "--context-length", pick(512, 1024, "2k", 4096))
    maybe(0.12, "--page-size", pick(1, 1, 16, 32, 64, 128))
    maybe(0.1, pick("--max-prefill-tokens", "--mem-fraction-static", "--port"), pick(1, 8192))
    maybe(0.1, "--enable-mixed-chunk")
    maybe(0.1, pick("--trust-remote-code", "--enable-metrics", "--disable-radix-cache", "--disable-overlap-schedule"))
    maybe(0.08, "--disaggregation-mode", pick("prefill", "decode", "null"))
    maybe(0.04, "--kv-cache-dtype", pick("auto", "fp8_e4m3"))
    _graphs(random, flags)
    _attention(random, flags)
    _speculation(random, flags)
    _lora(random, flags)
    maybe(0.02, "--debug-tensor-dump-output-folder", "dump")
    model, device = pick(*MODELS), pick(*DEVICES)
    architecture = MODELS[model][0]
    if architecture in LATENT:
        draw_latent(random, flags)
    draw_overlap(random, flags)
    draw_family(random, architecture, flags)
    if architecture in (*LATENT, *SPARSE, *VISION, *HYBRID) or "--enable-two-batch-overlap" in flags:
        without_whole_prefills(flags)
    if random.random() < (0.7 if model in _WITH_A_DRAFT else 0.1):
        flags.pop("--speculative-draft-model-path", None)
    _mistakes(random, flags)
    if flags.get("--speculative-draft-attention-backend") == ["trtllm_mha"]:
        flags["--speculative-draft-attention-backend"] = [random.choice(["trtllm_mha", "triton"])]
        if flags.get("--speculative-eagle-topk") not in (None, ["1"]) or MODELS[model][0] == "LlamaForCausalLM":
            flags["--speculative-draft-attention-backend"] = ["triton"]
    names = list(flags)
    random.shuffle(names)
    file = None
    command = ["--model-path", "MODEL"] if random.random() < 0.9 else ["--model=MODEL".partition("=")[0], "MODEL"]
    if random.random() < 0.1:
        file, names = _file(random, flags, names)
        command += ["--config", "CONFIG"]
    for name in names:
        values = flags[name]
        joined = len(values) == 1 and values != ["MODEL"] and random.random() < 0.1
        command += [f"{name}={values[0]}"] if joined else [name, *values]
    return Case(command=tuple(command), model=model, device=device, file=file)


def _file(random: Random, flags: dict[str, list[str]], names: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Move some flags into the file of --config."""
    moved = [name for name in names if random.random() < 0.5 and name.startswith("--")]
    file: dict[str, Any] = {}
    for name in moved:
        values = flags[name]
        value: Any = [int(v) if v.lstrip("-").isdigit() else v for v in values]
        if name == "--cuda-graph-config":
            try:
                value = [json.loads(values[0])]
            except ValueError:
                value = values
        file[name[2:]] = True if not values else value if "-bs-" in name and "max" not in name else value[0]
    return file, [name for name in names if name not in moved]


def _parallel(random: Random, flags: dict[str, list[str]]) -> None:
    if random.random() < 0.55:
        flags[random.choice(["--tp-size", "--tensor-parallel-size", "--tp-size"])] = [
            str(random.choice([1, 2, 3, 4, 4, 8, 8, 8]))
        ]
    roll = random.random()
    if roll < 0.2:
        flags["--attn-dp-size"] = [str(random.choice([1, 2, 2, 4]))]
    elif roll < 0.35:
        flags["--dp-size"] = [str(random.choice([1, 2, 2, 4]))]
        if random.random() < 0.7:
            flags["--enable-dp-attention"] = []
    if random.random() < 0.12:
        flags["--moe-dense-tp-size"] = [str(random.choice([1, 1, 1, 1, 1, 4]))]
    if roll < 0.35 and random.random() < 0.8:
        flags["--tp-size"] = [str(random.choice([4, 8]))]
        flags.pop("--tensor-parallel-size", None)
    for flag in ("--enable-dp-lm-head", "--disable-attn-tp-gather", "--enable-tp-lm-head-all-to-all"):
        if random.random() < 0.04:
            flags[flag] = []
    if random.random() < 0.08:
        flags["--pp-size"] = [str(random.choice([1, 2, 4]))]
    if random.random() < 0.05:
        flags["--nnodes"] = [str(random.choice([1, 2]))]


def _sizes(random: Random, most: int) -> list[str]:
    count = random.randint(1, 8)
    return [str(random.randint(1, random.choice([8, 64, most]))) for _ in range(count)]


def _graphs(random: Random, flags: dict[str, list[str]]) -> None:
    def maybe(chance: float, flag: str, *values: Any) -> None:
        if random.random() < chance:
            flags[flag] = [str(value) for value in values]

    most = random.choice([0, 1, 3, 8, 17, 100, 200, 256, 300, 600, 1024, 3000])
    maybe(0.2, "--cuda-graph-max-bs-decode", most)
    maybe(0.15, "--cuda-graph-bs-decode", *_sizes(random, 600))
    maybe(0.15, "--cuda-graph-max-bs-prefill", random.choice([1, 4, 30, 256, 1000, 4096, 20000]))
    maybe(0.12, "--cuda-graph-bs-prefill", *_sizes(random, 9000))
    maybe(0.06, "--cuda-graph-max-seq-len-prefill", random.choice([16, 256, 2048]))
    backends = ["full", "breakable", "disabled"]
    maybe(0.12, "--cuda-graph-backend-decode", random.choice(backends))
    maybe(0.18, "--cuda-graph-backend-prefill", random.choice(backends))
    maybe(0.04, "--disable-prefill-cuda-graph")
    maybe(0.04, "--disable-decode-cuda-graph")
    maybe(0.03, "--disable-cuda-graph")
    maybe(0.12, "--disable-cuda-graph-padding")
    maybe(0.04, "--enable-torch-compile")
    if random.random() < 0.12:
        config: dict[str, dict[str, Any]] = {}
        if random.random() < 0.7:
            config["decode"] = {"max_bs": random.choice([None, 4, 64, 500])}
            if random.random() < 0.4:
                config["decode"]["bs"] = sorted(int(size) for size in _sizes(random, 300))
            if random.random() < 0.4:
                config["decode"]["backend"] = random.choice(backends)
        if random.random() < 0.7:
            config["prefill"] = {"backend": random.choice(backends)}
            if random.random() < 0.4:
                config["prefill"]["full_prefill_max_req"] = random.choice([1, 4, 64])
            if random.random() < 0.3:
                config["prefill"]["bs"] = sorted(int(size) for size in _sizes(random, 5000))
            if random.random() < 0.2:
                config["prefill"]["max_seq_len"] = 1000
        flags["--cuda-graph-config"] = [json.dumps(config)]


def _attention(random: Random, flags: dict[str, list[str]]) -> None:
    names = ["fa3", "fa4", "flashinfer", "triton", "trtllm_mha", "torch_native", "flex_attention"]
    weights = [4, 2, 4, 4, 2, 1, 1]
    halves = names[:5]
    for flag, chance in (
        ("--attention-backend", 0.3),
        ("--decode-attention-backend", 0.08),
        ("--prefill-attention-backend", 0.08),
        ("--speculative-draft-attention-backend", 0.08),
    ):
        if random.random() < chance:
            both = flag == "--attention-backend"
            flags[flag] = random.choices(names, weights) if both else [random.choice(halves)]


_WITH_A_DRAFT = ("glm", "deepseek-v3", "glm-flash", "qwen3-next", "qwen3.5", "deepseek-v3.2", "glm-5")


def _speculation(random: Random, flags: dict[str, list[str]]) -> None:
    if random.random() > 0.45:
        return
    algorithm = random.choice(["EAGLE", "EAGLE", "EAGLE3", "eagle3", "NEXTN", "STANDALONE", "NGRAM"])
    flags["--speculative-algorithm"] = [algorithm]
    if algorithm == "NGRAM":
        if random.random() < 0.4:
            flags["--speculative-ngram-max-bfs-breadth"] = [str(random.choice([1, 4]))]
        if random.random() < 0.5:
            flags["--speculative-num-draft-tokens"] = [str(random.choice([1, 4, 8]))]
        return
    flags["--speculative-draft-model-path"] = ["MODEL"]
    if random.random() < 0.15:
        flags["--speculative-attention-mode"] = [random.choice(["prefill", "decode"])]
    if random.random() < 0.25:
        return
    flags["--speculative-num-steps"] = [str(random.choice([0, 1, 1, 2, 2, 3, 3, 3, 5, 5]))]
    if random.random() < 0.95:
        flags["--speculative-eagle-topk"] = [str(random.choice([1, 1, 1, 1, 1, 4]))]
    if random.random() < 0.9:
        flags["--speculative-num-draft-tokens"] = [str(random.choice([1, 2, 4, 8, 16]))]


def _lora(random: Random, flags: dict[str, list[str]]) -> None:
    if random.random() > 0.2:
        return
    if random.random() < 0.5:
        flags["--enable-lora"] = []
        flags["--max-lora-rank"] = ["16"]
        flags["--lora-target-modules"] = random.choice([["all"], ["q_proj", "v_proj"], ["q_proj"]])
    else:
        flags["--lora-paths"] = random.choice([["a=x"], ["x", "b=y"]])
    if random.random() < 0.5:
        flags["--max-loras-per-batch"] = [str(random.choice([1, 4, 16]))]
    if random.random() < 0.4:
        flags["--lora-backend"] = [random.choice(["triton", "csgmv", "triton_v2", "torch_native"])]
    if random.random() < 0.1:
        flags["--max-loaded-loras"] = [str(random.choice([1, 32]))]


def _mistakes(random: Random, flags: dict[str, list[str]]) -> None:
    """Now and then, one flag that SGLang refuses."""
    if random.random() > 0.06:
        return
    name, *values = random.choice(
        [
            ("--cuda-graph-max-bs", "64"),
            ("--cuda-graph-bs", "1", "2"),
            ("--no-such-flag",),
            ("--cuda-graph-backend-decode", "tc_piecewise"),
            ("--cuda-graph-config", "{"),
            ("--cuda-graph-config", '{"mixed": {}}'),
            ("--cuda-graph-config", '{"decode": {"max_seq_len": 4}}'),
            ("--cuda-graph-config", '{"prefill": {"backend": null}}'),
            ("--cuda-graph-config", '{"decode": {"bs": []}}'),
            ("--tp-size", "two"),
            ("--attn-dp-size", "0"),
            ("--attention-backend", "fast"),
            ("--max-loras-per-batch", "0"),
            ("--lora-target-modules", "all", "q_proj"),
            ("--max-lora-chunk-size", "17"),
            ("--cuda-graph-bs-decode", "-1", "4"),
            ("--lora-backend", "none"),
            ("--enable-lora",),
            ("--lora-paths", '{"lora_name": "a"}'),
            ("--max-total-tokens", "1.5Ki"),
            ("--schedule-policy", "slow"),
            ("--log-requests-level", "7"),
            ("--port", "http"),
            ("--cuda-graph-max", "4"),
        ]
    )
    flags[name] = list(values)


def batches(random: Random, count: int, *, loras: bool = False) -> list[Batch]:
    """Draw batches of all roles: decodes, verifications, prefills and odd ones."""
    found = []
    for _ in range(count):
        role = random.choice(list(Role))
        reqs = max(1, int(random.choice([8, 64, 300, 1200]) * random.random() ** 2))
        active = random.randint(0, 4) if loras else 0
        if random.random() < 0.6:
            width = random.choice([1, 1, 2, 3, 4, 4, 6, 8, 12])
            batch = Batch(role=role, num_reqs=reqs, num_tokens=reqs * width, query_len=width, active_loras=active)
        else:
            tokens = reqs + int(random.choice([16, 500, 10000]) * random.random() ** 2)
            batch = Batch(role=role, num_reqs=reqs, num_tokens=tokens, past_prompt=False, active_loras=active)
        found.append(batch)
    return found


def ranks(random: Random, count: int) -> list[list[int]]:
    """Draw request counts of four attention-DP ranks, some of them idle."""
    return [
        [random.choice([0, 1, random.randint(1, 40), random.randint(1, 600)]) for _ in range(4)] for _ in range(count)
    ]
