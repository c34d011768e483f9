"""The last steps of vLLM's mode: which attention backend runs, what it supports, and what is left.

The ladder is that of ``resolve_cudagraph_mode_and_sizes``; the backends are those that vLLM's CUDA platform
chooses from, with the support level that each one's metadata builder reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from capture_planner.engines.vllm.flags import refusal
from capture_planner.engines.vllm.model import Model
from capture_planner.engines.vllm.parts import names
from capture_planner.errors import FlagError
from capture_planner.modes import GraphMode, GraphSupport

FLAG = "--attention-backend"
_SM80, _SM121 = (8, 0), (12, 1)
_ORDER = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
_ORDER_SM100 = ("FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")
_MLA_ORDER = {
    10: ("FLASHINFER_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"),
    12: ("TRITON_MLA",),
}
_MLA_ELSE = ("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA")
EMULATED = (*_ORDER, *_MLA_ORDER[10])
"""The backends whose support is known here."""


@attrs.frozen(kw_only=True)
class Attention:
    """What decides a backend: the machine, the model, and the flags about attention."""

    capability: tuple[int, int]
    model: Model
    tensor: int = 1
    decode_context: int = 1
    flash_attn: int | None = None
    """``flash_attn_version`` where a flag sets it."""
    trtllm: bool | None = None
    """``use_trtllm_attention`` where a flag sets it."""
    connector: bool = False
    adaptive: bool = False

    def flash_attn_version(self) -> int | None:
        """Return the FlashAttention that runs here, or None below Ampere."""
        if self.capability < _SM80:
            return None
        major = self.capability[0]
        version = {9: 3, 10: 4}.get(major, 2)
        version = self.flash_attn or version
        if major >= 10 and version == 3:
            version = 4 if major in (10, 11) else 2
        usable = {2: True, 3: major == 9, 4: major in (9, 10, 11)}[version]
        return version if usable else None

    @property
    def _trtllm_decode(self) -> bool:
        """Whether FlashInfer has a decode kernel here that takes several tokens of each request."""
        if self.trtllm is False:
            return False
        heads, kv_heads = self.model.heads // self.tensor, max(1, self.model.kv_heads // self.tensor)
        grouped = not self.model.heads or heads % kv_heads == 0
        return grouped and (self.capability == (9, 0) or self.capability[0] in (10, 12))

    def support(self, backend: str) -> GraphSupport:
        """Return what a backend reports on this machine."""
        if backend == "FLASH_ATTN":
            full = self.flash_attn_version() in (3, 4)
            return GraphSupport.ALWAYS if full else GraphSupport.UNIFORM_BATCH
        if backend == "FLASHINFER":
            if self.decode_context > 1:
                return GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
            if self.capability < (9, 0) or self._trtllm_decode:
                return GraphSupport.UNIFORM_BATCH
            return GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
        if backend == "CUTLASS_MLA":
            return GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
        always = ("TRITON_ATTN", "FLEX_ATTENTION", "FLASHINFER_MLA")
        return GraphSupport.ALWAYS if backend in always else GraphSupport.UNIFORM_BATCH

    def refreshes(self, backend: str) -> bool:
        """Whether a backend can follow a draft's next position inside a graph."""
        if backend in ("FLASH_ATTN", "TRITON_MLA"):
            return self.decode_context == 1
        if backend == "FLASHINFER":
            return self.capability[0] == 10 and self._trtllm_decode and self.decode_context == 1
        return backend == "TRITON_ATTN"

    def varies(self, backend: str) -> bool:
        """Whether a decode graph takes any mix of query lengths up to 1 + K, as adaptive verification needs."""
        if self.support(backend) is GraphSupport.ALWAYS:
            return True
        return backend == "FLASHINFER" and self.capability[0] == 10 and self._trtllm_decode

    def unusable(self, backend: str) -> str | None:
        """Return why a backend cannot run here, or None where it can."""
        mla = backend.endswith("MLA")
        if mla != self.model.mla:
            return "it is for MLA models" if mla else "the model has MLA"
        major = self.capability[0]
        needs: dict[str, tuple[bool, str]] = {
            "FLASH_ATTN": (self.capability >= _SM80, "it needs compute capability 8.0"),
            "FLASHINFER": (_SM80 <= self.capability <= _SM121, "it needs compute capability 8.0 to 12.1"),
            "FLASHINFER_MLA": (major == 10, "it needs compute capability 10"),
            "CUTLASS_MLA": (major == 10, "it needs compute capability 10"),
            "FLASH_ATTN_MLA": (major == 9, "it needs compute capability 9"),
            "FLASHMLA": (major == 9, "it needs compute capability 9"),
        }
        fits, reason = needs.get(backend, (True, ""))
        if not fits:
            return reason
        if self.model.head_size not in _HEAD_SIZES.get(backend, (self.model.head_size,)):
            return f"it has no heads of {self.model.head_size}"
        if self.decode_context > 1 and backend in _NO_DCP:
            return "it has no decode context parallelism"
        on_device = major == 10 and self._trtllm_decode and self.decode_context == 1
        if self.adaptive and backend == "FLASHINFER" and not on_device:
            return "it plans from the host's query lengths, which adaptive verification changes"
        return None

    def choose(self, flag: str, asked: str | None) -> str:
        """Return the backend that runs; raises ``FlagError`` where the one asked for cannot."""
        if asked is not None:
            if asked not in EMULATED:
                raise refusal(flag, f"{asked} is not emulated", f"give one of {', '.join(EMULATED)}")
            reason = self.unusable(asked)
            if reason is not None:
                remedy = "leave the flag out, or give another"
                raise self.model.refusal(flag, f"vLLM refuses {asked} here: {reason}", remedy)
            return asked
        if self.model.mla:
            order: Sequence[str] = _MLA_ORDER.get(self.capability[0], _MLA_ELSE)
        else:
            order = _ORDER_SM100 if self.capability[0] == 10 else _ORDER
        for backend in order:
            if self.unusable(backend) is None:
                return backend
        reason = "vLLM finds no attention backend for this machine and model"
        raise self.model.refusal(flag, reason, "use another machine")


_NO_DCP = ("FLEX_ATTENTION", "TRITON_ATTN")
_HEAD_SIZES = {"FLASHINFER": (64, 128, 256, 512)}


def backend_name(flag: str, text: str | None) -> str | None:
    """Return a backend in vLLM's capitals, None for ``auto``; raises ``FlagError`` for an unknown one."""
    if text is None or text.lower() == "auto":
        return None
    if text.upper() not in names()["backends"]:
        raise refusal(flag, f"vLLM has no backend {text}", f"give one of {', '.join(EMULATED)}")
    return text.upper()


@attrs.frozen(kw_only=True)
class Ladder:
    """What the ladder needs beside the mode. ``note`` is told (rule, before, after, sentence)."""

    support: GraphSupport
    backend: str
    query_len: int
    splits_attention: bool
    graph_partition: bool
    compiles: bool
    """Whether vLLM's own compilation runs, in pieces."""
    piecewise_capture: bool
    note: Callable[[str, GraphMode, GraphMode, str], None]

    def resolve(self, mode: GraphMode) -> GraphMode:
        """Return the mode that is left; raises ``FlagError`` where nothing can be."""
        if mode is GraphMode.NONE:
            return mode
        if mode.mixed_mode is GraphMode.FULL and self.support < GraphSupport.ALWAYS:
            if self.support is GraphSupport.NEVER:
                raise self._no_graph(mode)
            after = GraphMode.FULL_AND_PIECEWISE if self.splits_attention else GraphMode.FULL_DECODE_ONLY
            mode = self._step("mixed-support", mode, after, "captures no mixed batches")
        if mode.decode_mode is GraphMode.FULL and self.support is GraphSupport.NEVER:
            pieces = self.compiles and (self.splits_attention or self.graph_partition)
            after = GraphMode.PIECEWISE if pieces else GraphMode.NONE
            mode = self._step("decode-support", mode, after, "captures no attention at all")
        wide = self.query_len > 1 and self.support < GraphSupport.UNIFORM_BATCH
        if mode.decode_mode is GraphMode.FULL and wide:
            after = GraphMode.PIECEWISE if self.splits_attention else GraphMode.NONE
            says = f"captures decodes of one token, and they have {self.query_len}"
            mode = self._step("speculative-support", mode, after, says)
        if not self.piecewise_capture and mode.has_piecewise:
            after = mode.without_piecewise
            self.note(
                "piecewise-capture", mode, after, "nothing is compiled in pieces, so nothing is captured so"
            )
            mode = after
        return mode

    def _step(self, rule: str, mode: GraphMode, after: GraphMode, says: str) -> GraphMode:
        self.note(rule, mode, after, f"{self.backend} {says}, so {mode.value} becomes {after.value}")
        return after

    def _no_graph(self, mode: GraphMode) -> FlagError:
        return refusal(
            "--compilation-config",
            f"vLLM refuses {mode.value}: {self.backend} captures no attention",
            "ask for PIECEWISE",
            "cudagraph_mode",
        )
