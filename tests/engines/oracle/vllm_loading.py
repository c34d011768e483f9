"""Load the modules of vLLM that decide about graphs, without the engine.

Some modules are loaded whole from the unpacked wheel; of larger ones single definitions are taken from the
source. All else that they import is a stub.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.files import module_at

GPU = "vllm.v1.worker.gpu"
AUTOREGRESSIVE = f"{GPU}.spec_decode.target_dependent_ar"
MODULES = (
    "vllm.utils.math_utils",
    "vllm.v1.spec_decode.dynamic.utils",
    f"{GPU}.cudagraph_utils",
    f"{GPU}.dp_utils",
    "vllm.v1.cudagraph_dispatcher",
    "vllm.v1.worker.dp_utils",
    f"{GPU}.spec_decode.speculator",
    f"{AUTOREGRESSIVE}.cudagraph_utils",
    f"{AUTOREGRESSIVE}.speculator",
    f"{GPU}.spec_decode.multi_module_mtp.speculator",
    f"{GPU}.spec_decode.dflash.cudagraph",
    f"{GPU}.spec_decode.dflash.speculator",
)
"""Loaded whole, in the order of their imports."""

PIECES = (
    ("vllm.config.compilation", ("CUDAGraphMode",)),
    ("vllm.forward_context", ("BatchDescriptor",)),
    ("vllm.lora.utils", ("get_captured_lora_counts",)),
    ("vllm.v1.worker.ubatch_utils", ("check_ubatch_thresholds", "get_num_ubatches", "is_last_ubatch_empty")),
    ("vllm.v1.worker.utils", ("is_uniform_query_len", "get_uniform_decode_token_count")),
)
"""Taken alone from modules that cannot be loaded, into a stub of the same name."""


def extract(folder: Path, module: str, name: str, scope: dict[str, Any], owner: str | None = None) -> Any:
    """Run one definition of a module alone, in ``scope``; decorators of functions are left out."""
    path = folder / (module.replace(".", "/") + ".py")
    body: Sequence[ast.stmt] = ast.parse(path.read_text()).body
    if owner is not None:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    found = next(node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name)
    if isinstance(found, ast.FunctionDef):
        found.decorator_list = []
    code = ast.Module(body=[found], type_ignores=[])
    future = "from __future__ import annotations\n"
    exec(compile(future + ast.unparse(code), str(path), "exec"), scope)
    return scope[name]


@contextmanager
def loaded(folder: Path) -> Iterator[dict[str, Any]]:
    """Load the modules while the context lasts; afterwards none is left in ``sys.modules``."""
    stubs = module_at(Path(__file__).with_name("stubs.py"))
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    for name in before:
        del sys.modules[name]
    finder = stubs.Finder("vllm")
    sys.meta_path.append(finder)

    def stub(name: str) -> Any:
        if name not in sys.modules:
            sys.modules[name] = stubs.StubModule(name)
            sys.modules[name].__path__ = []
            if "." in name:
                stub(name.rpartition(".")[0])
        return sys.modules[name]

    try:
        found: dict[str, Any] = {"anything": stubs.StubModule("vllm.anything")}
        for name, pieces in PIECES:
            scope: dict[str, Any] = {"enum": enum, "dataclass": dataclasses.dataclass, "__name__": name}
            found[name] = stub(name)
            for piece in pieces:
                setattr(found[name], piece, extract(folder, name, piece, scope))
        # Some modules import the modes from the package.
        stub("vllm.config").CUDAGraphMode = found["vllm.config.compilation"].CUDAGraphMode
        for name in MODULES:
            stub(name.rpartition(".")[0])
            spec = importlib.util.spec_from_file_location(name, folder / (name.replace(".", "/") + ".py"))
            if spec is None or spec.loader is None:
                raise ImportError(name)
            sys.modules[name] = found[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found[name])
        yield found
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(before)
