"""vLLM's choice of the attention backend on CUDA, and what each backend supports.

The order of the backends, the reasons to skip each, and the support level that its metadata builder reports, by
machine, model, dtypes and block size (vllm/platforms/cuda.py and vllm/v1/attention/backends at 0.33.0).
"""

from __future__ import annotations

import attrs

from capture_planner.engines.emulation import BY_MODEL
from capture_planner.engines.parsing import refusal
from capture_planner.modes import GraphSupport
from capture_planner_vllm.emulation.model import ModelFacts
from capture_planner_vllm.emulation.refusals import not_emulated
from capture_planner_vllm.emulation.releases import has
from capture_planner_vllm.emulation.tables import names, rules

BACKEND = "--attention-backend"
_SM80, _SM90, _SM121 = (8, 0), (9, 0), (12, 1)
_RULES = rules()["attention"]
"""Backends in vLLM's order, their quantized KV cache dtypes, and the number that a KV block is a multiple of."""
_SPARSE = _RULES["sparse"]
"""Backends of sparse MLA, each with its compute capabilities, dtypes, KV cache dtypes, and block size."""
EMULATED = (*_RULES["order"], *_RULES["mla_order_sm100"], *_SPARSE)
"""The backends whose support is emulated."""
_PLAIN = ("auto", "float16", "bfloat16")
_MLA_HEADS = (320, 512, 576)
_NO_DCP = ("FLEX_ATTENTION", "TRITON_ATTN", "FLASH_ATTN_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120")
_PACKED = "turboquant_"
_UNEQUAL = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")
"""The backends of MiMo-V2, whose layers choose between them alone (models/mimo_v2.py)."""


@attrs.frozen(kw_only=True)
class AttentionChoice:
    """The inputs of the choice: the machine, the model, and the flags about attention and the KV cache."""

    capability: tuple[int, int]
    model: ModelFacts
    tensor: int = 1
    decode_context: int = 1
    flash_attn: int | None = None
    """``flash_attn_version`` if a flag sets it."""
    trtllm: bool | None = None
    """``use_trtllm_attention`` if a flag sets it."""
    adaptive: bool = False
    causal: bool = True
    cross: bool = False
    """Whether a decoder attends to an encoder's states."""
    dtype: str = "bfloat16"
    """The resolved dtype of weights and activations."""
    cache: str = "auto"
    """The KV cache dtype of the flag, or else of the checkpoint."""
    block: int | None = None
    """``--block-size`` if it is given."""
    by_model: bool = False
    """Whether a target decides that is not emulated: its layers report no more than the highest level."""

    @property
    def _quantized(self) -> bool:
        return self.cache not in _PLAIN

    @property
    def heads(self) -> int:
        """Attention heads of one rank; 0 if unknown."""
        return self.model.heads // self.tensor

    def flash_attn_version(
        self, head_size: int | None = None, *, block: int | None = None, wide: bool = False
    ) -> int | None:
        """Return the FlashAttention version that runs, or None; ``wide`` allows Blackwell's kernel for heads of 256."""
        if self.capability < _SM80:
            return None
        major, head = self.capability[0], head_size or 0
        # The defaults and fallbacks of get_flash_attn_version (backends/fa_utils.py), in its order.
        version = self.flash_attn or {9: 3, 10: 4}.get(major, 2)
        if major >= 10 and version == 3:  # FA3 is of Hopper alone
            version = 4 if major in (10, 11) else 2
        if version == 3 and major == 9 and head > 256:  # FA3 has no larger heads
            version = 4
        # FA4 has a kernel of its own for this size, which not every caller takes.
        if version == 4 and head == 256 and major in (10, 11) and (not wide or self._spoils_wide(block)):
            version = 2
        # Tensor memory limits the heads of FA4 on Blackwell.
        if version == 4 and major >= 10 and head > 128 and head != 256:
            version = 2
        usable = {2: True, 3: major == 9, 4: major in (9, 10, 11)}[version]
        return version if usable else None

    def _spoils_wide(self, block: int | None) -> bool:
        model = self.model
        paged = block is not None and block % 128 != 0
        return model.sinks or model.soft_cap or self._quantized or paged or self.decode_context > 1

    @property
    def _trtllm_decode(self) -> bool:
        """Whether FlashInfer has a decode kernel here that takes several tokens of each request."""
        if self.trtllm is False:
            return False
        kv_heads = max(1, self.model.kv_heads // self.tensor)
        grouped = not self.model.heads or self.heads % kv_heads == 0
        return grouped and (self.capability == _SM90 or self.capability[0] in (10, 12))

    def support(self, backend: str) -> GraphSupport:
        """Return the lowest support level that the model's layers report with a backend on this machine."""
        if self.by_model:
            return GraphSupport.ALWAYS  # The most that any model's layers have.
        if self.model.chunked:
            # Its builder reports no support, whatever backend it wraps (layers/attention/chunked_local_attention.py).
            return GraphSupport.NEVER
        own = self._support(backend)
        # The weakest group decides, and recurrent layers report no more than this.
        return min(own, GraphSupport.UNIFORM_BATCH) if self.model.recurrent else own

    def _support(self, backend: str) -> GraphSupport:
        if backend.startswith("FLASH_ATTN") and "MLA" not in backend:
            # FA2 packs grouped queries for the query length at capture: a decode graph of it serves no mixed batch.
            full = self.flash_attn_version() in ((3, 4) if has("fa4-graphs") else (3,))
            return GraphSupport.ALWAYS if full else GraphSupport.UNIFORM_BATCH
        if backend == "FLASHINFER":
            # XQA has no log-sum-exp to merge the ranks' parts by, and trtllm-gen no graph of varying lengths then.
            if self.decode_context > 1:
                return GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
            # FlashInfer's FA2 kernels run decodes of several tokens where attention is causal.
            if self.capability < _SM90:
                wide = self.causal and has("fa2-wide-decodes")
            else:
                # trtllm-gen on SM100, XQA on SM90 and SM12x: FlashInfer's other kernels
                # take one token of each request here.
                wide = self._trtllm_decode and self._xqa_fits()
                wide = wide and (self.causal or self.capability[0] != 10)
            return GraphSupport.UNIFORM_BATCH if wide else GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
        if backend == "CUTLASS_MLA":
            return GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
        always = ("TRITON_ATTN", "FLEX_ATTENTION", "FLASHINFER_MLA", _UNEQUAL[1])
        return GraphSupport.ALWAYS if backend in always else GraphSupport.UNIFORM_BATCH

    def _xqa_fits(self) -> bool:
        """Whether the decode kernel of Hopper and consumer Blackwell supports the heads and the KV cache."""
        if self.capability[0] == 10:
            return True
        size = self.model.head_size
        cached = not self.cache.startswith("nvfp4") or self.capability[0] == 12
        return cached and 16 <= size <= 256 and size % 16 == 0

    def refreshes(self, backend: str) -> bool:
        """Whether a backend can advance a draft to its next position inside a graph."""
        if backend in ("FLASH_ATTN", _UNEQUAL[0], "TRITON_MLA") or _SPARSE.get(backend, {}).get("refreshes"):
            return self.decode_context == 1
        # Its other wrappers plan on the host between two draft steps, which cannot be inside of one graph.
        if backend == "FLASHINFER":
            return self.capability[0] == 10 and self._trtllm_decode and self.decode_context == 1
        return backend in ("TRITON_ATTN", _UNEQUAL[1])

    def varies(self, backend: str) -> bool:
        """Whether a decode graph serves any mix of query lengths up to 1 + K, as adaptive verification needs."""
        if self.by_model:
            return True
        # Chunked attention is never captured; of recurrent layers, only Mamba 2's support query lengths that
        # only the device knows.
        if self.model.chunked or (self.model.recurrent and not (self.model.varies and has("mamba2-varies"))):
            return False
        if self._support(backend) is GraphSupport.ALWAYS:
            return True
        return backend == "FLASHINFER" and self.capability[0] == 10 and self._trtllm_decode

    def unusable(self, backend: str) -> str | None:
        """Return the reason why a backend cannot run, or None where it can."""
        if ("MLA" in backend) != self.model.mla:
            return "the model uses MLA" if self.model.mla else "it is for MLA models"
        if (backend in _SPARSE) != self.model.sparse:
            return "the model's attention is sparse" if self.model.sparse else "it is for sparse attention"
        if not self._fits_machine(backend):
            return f"it does not run on compute capability {'.'.join(map(str, self.capability))}"
        if self.dtype == "float32" and backend not in ("TRITON_ATTN", "FLEX_ATTENTION"):
            return "it does not support float32"
        if self.dtype not in _SPARSE.get(backend, {}).get("dtypes", [self.dtype]):
            return f"it does not support {self.dtype}"
        if not self._fits_heads(backend):
            return f"it does not support heads of {self.model.head_size}"
        if not self._fits_cache(backend):
            return f"it does not support a KV cache of {self.cache}"
        base = self._block_base(backend)
        if self.block is not None and self.block % base:
            return f"its blocks are multiples of {base}, not {self.block}"
        if self.model.sinks and not self._has_sinks(backend):
            return "it does not support attention sinks"
        if self.cross and backend not in ("FLASH_ATTN", "TRITON_ATTN"):
            return "it does not support cross attention"
        if self.decode_context > 1 and backend in _NO_DCP:
            return "it does not support decode context parallelism"
        on_device = self.capability[0] == 10 and self._trtllm_decode and self.decode_context == 1
        if self.adaptive and backend == "FLASHINFER" and not on_device:
            return "it plans from the host's query lengths, which adaptive verification changes"
        return None

    def _fits_machine(self, backend: str) -> bool:
        major = self.capability[0]
        if backend in _SPARSE:
            return major in _SPARSE[backend]["majors"]
        if backend in ("FLASH_ATTN", "FLASHINFER"):
            return self.capability >= _SM80 and (backend == "FLASH_ATTN" or self.capability <= _SM121)
        majors = {"FLASHINFER_MLA": 10, "CUTLASS_MLA": 10, "FLASH_ATTN_MLA": 9, "FLASHMLA": 9}
        return majors.get(backend, major) == major

    def _fits_heads(self, backend: str) -> bool:
        size = self.model.head_size
        if backend == "FLASH_ATTN":
            most = 512 if self.capability[0] in (9, 10, 11) else 256
            return size % 8 == 0 and size <= most
        if backend == "FLASHINFER":
            return size in (64, 128, 256, 512)
        if backend == "TRITON_ATTN":
            return size >= 32
        # The sizes that FlashInfer's kernel has (mla/flashinfer_mla.py).
        if backend == "FLASHINFER_MLA" and self.model.nope_size not in (64, 128, 192):
            return False
        if backend.endswith("FA4"):
            heads, most = self.heads * self.decode_context, 64 if self.decode_context > 1 else 128
            return heads in (8, 16, 32, 64, 128) and heads <= most and self.model.top % 128 == 0
        if backend.endswith("SM120") and self.model.top != 2048:
            return False
        return not self.model.mla or backend == "TRITON_MLA" or size in _MLA_HEADS

    def _fits_cache(self, backend: str) -> bool:
        if backend in _SPARSE:
            return self.cache in ("auto", *_SPARSE[backend]["caches"])
        if not self._quantized:
            return True
        if self.cache not in _RULES["caches"].get(backend, _RULES["mla_cache"]):
            return False
        major = self.capability[0]
        if backend == "FLASH_ATTN":
            size = self.model.head_size
            version = self.flash_attn_version(size, block=self.block, wide=True)
            first = self.flash_attn_version()
            if major == 9:
                return first in (3, 4) and (version == 3 or (version == 4 and size == 512))
            return major == 10 and first == version == 4
        if backend == "FLASHINFER" and self.cache.startswith("nvfp4"):
            if major in (8, 9, 12):
                return self.cache == "nvfp4" and self.model.head_size != 64 and not self.model.sinks
            return major == 10
        return True

    def _block_base(self, backend: str) -> int:
        if backend != "FLASH_ATTN":
            return int(_SPARSE.get(backend, {}).get("block") or _RULES["blocks"].get(backend, 16))
        size, major = self.model.head_size, self.capability[0]
        if major == 9 and size == 512 and self.cache in _RULES["mla_cache"] and self.flash_attn_version(size) == 4:
            return 64
        if size == 256 and major in (10, 11) and self.flash_attn_version(size, wide=True) == 4:
            return 128
        return 16

    def _has_sinks(self, backend: str) -> bool:
        # FA2 takes no sinks.
        if backend == "FLASH_ATTN":
            return self.capability >= _SM90 and self.flash_attn_version() in (3, 4)
        if backend == "FLASHINFER":
            return self.trtllm is not False and (self.capability == _SM90 or self.capability[0] in (10, 12))
        return backend == "TRITON_ATTN"

    def _sparse_order(self) -> str:
        """Return the key of the order: on Blackwell it depends on the KV cache and on the heads of a rank."""
        if self.capability[0] != 10:
            return "sparse_order"
        # By the benchmarks of vllm#35807: FlashInfer first for quantized caches, other kernels by the heads of a rank.
        if self._quantized:
            return "sparse_order_quantized"
        return (
            "sparse_order" if self.heads > 16 else "sparse_order_few" if has("fa4-sparse") else "sparse_order_quantized"
        )

    def choose(self, flag: str, name: str | None) -> str:
        """Return the backend, ``name`` if given; raises ``FlagError`` if it cannot run, ``NotEmulated`` if unknown."""
        if self.by_model:
            return name or BY_MODEL
        if self.cache.startswith(_PACKED):
            raise not_emulated("--kv-cache-dtype", self.cache, "give auto, fp8 or another built-in dtype")
        if self.model.unequal:
            if self._quantized:
                raise not_emulated("--kv-cache-dtype", f"{self.cache} with heads of two sizes", "give auto")
            return name if name in _UNEQUAL else _UNEQUAL[self.flash_attn_version() not in (3, 4)]
        if name is not None:
            if name not in EMULATED:
                raise not_emulated(flag, "", f"give one of {', '.join(EMULATED)}", reason=f"{name} is not emulated")
            reason = self.unusable(name)
            if reason is not None:
                message = f"vLLM cannot run {name}: {reason}"
                raise self.model.refusal(flag, message, "leave the flag out, or give another")
            return name
        major = self.capability[0]
        # FlashInfer's non-causal path has problems on SM100, so FlashAttention comes first there (platforms/cuda.py).
        key = "order_sm100" if major == 10 and self.causal else "order"
        if self.model.mla:
            key = {10: "mla_order_sm100", 12: "mla_order_sm120"}.get(major, "mla_order")
        if self.model.sparse:
            key = self._sparse_order()
        reasons = {backend: self.unusable(backend) for backend in _RULES[key]}
        for backend, reason in reasons.items():
            if reason is None:
                return str(backend)
        listed = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
        message = f"no attention backend supports this machine, model and KV cache: {listed}"
        raise self.model.refusal(flag, message, "change one of these")


def backend_name(flag: str, text: str | None, *inside: str) -> str | None:
    """Return a backend in vLLM's capitals, None for ``auto``; raises ``FlagError`` for an unknown one."""
    if text is None or text.lower() == "auto":
        return None
    if text.upper() not in names()["backends"]:
        raise refusal(flag, f"vLLM has no backend {text}", f"give one of {', '.join(EMULATED)}", *inside)
    return text.upper()
