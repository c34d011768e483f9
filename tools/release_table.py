"""Make the table of an engine's releases from its wheels: ceilings, defaults, limits, flags, and whose code is which.

    python tools/release_table.py vllm FOLDER
    python tools/release_table.py sglang FOLDER

FOLDER has the wheels, one for each release, or unpacked ones as ``vllm-0.24.0``. Nothing is imported from them: a
function is cut out of the source by ``ast`` and asked, with stand-ins for what it reads, and the code of a part is
compared without its texts, types and log lines. Writes ``by_release.yaml`` of the engine's distribution.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import copy
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parent.parent
Key = tuple[int, ...]


class Anything:
    """Stands for what decides nothing: every attribute, call and item of it is one more."""

    def __getattr__(self, name: str) -> Any:
        # ``copy`` and others ask for such names, and take any answer for support.
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Anything()


class Unset(SimpleNamespace):
    """A record whose fields are None until they are set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


class _Names(dict[str, Any]):
    """Globals of a function that was cut out: names given, builtins, or anything."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, None) or Anything()


class Sources:
    """The Python files of one release, from a wheel or from a folder."""

    def __init__(self, package: str, place: Path) -> None:
        self._package, self._folder, self._wheel = package, place, None
        if place.suffix == ".whl":
            self._wheel = zipfile.ZipFile(place)
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, file: str) -> ast.Module | None:
        """Return the tree of a file below the package, or None where the release has no such file."""
        if file not in self._trees:
            self._trees[file] = self._parse(f"{self._package}/{file}")
        return self._trees[file]

    def _parse(self, path: str) -> ast.Module | None:
        try:
            text = (self._folder / path).read_bytes() if self._wheel is None else self._wheel.read(path)
        # A wheel without the file raises KeyError; a folder raises the others.
        except (KeyError, FileNotFoundError, NotADirectoryError):
            return None
        return ast.parse(text)

    def files(self, folder: str) -> Iterator[str]:
        """Yield the Python files below a folder of the package."""
        prefix = f"{self._package}/"
        if self._wheel is not None:
            names: Sequence[str] = self._wheel.namelist()
        else:
            names = [str(path.relative_to(self._folder)) for path in (self._folder / prefix / folder).rglob("*.py")]
        yield from sorted(n.removeprefix(prefix) for n in names if n.startswith(prefix + folder) and n.endswith(".py"))

    def find(self, *places: str) -> ast.AST | None:
        """Return the first of ``file:Class.function`` that there is; a file alone is its whole tree."""
        for place in places:
            file, _, name = place.partition(":")
            node: ast.AST | None = self.tree(file)
            for part in filter(None, name.split(".")):
                node = next((each for each in getattr(node, "body", ()) if part in _bound(each)), None)
            if node is not None:
                return node
        return None

    def function(self, *places: str, **names: Any) -> Callable[..., Any] | None:
        """Return a function that can be called without its module: what it imports and names is given, or anything."""
        found = self.find(*places)
        if not isinstance(found, ast.FunctionDef):
            return None
        # A copy, as the tree is kept and asked for other parts.
        node = _WithoutImports().visit(copy.deepcopy(found))
        # A decorator that is a stand-in would return no function.
        node.decorator_list, node.returns = [], None
        for each in (*node.args.args, *node.args.kwonlyargs):
            each.annotation = None
        space = _Names(names)
        code = compile(ast.fix_missing_locations(ast.Module(body=[node], type_ignores=[])), places[0], "exec")
        exec(code, space)
        return space[node.name]  # type: ignore[no-any-return]


def _bound(node: ast.AST) -> list[str]:
    """Return the names that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [each.id for each in targets if isinstance(each, ast.Name)]


class _WithoutImports(ast.NodeTransformer):
    """Imports bind nothing: their names are those given, or anything."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        # An import may be all that a branch has.
        return ast.Pass()

    visit_Import = visit_ImportFrom  # type: ignore[assignment]  # noqa: N815


class _Bare(ast.NodeTransformer):
    """A function without texts, types and log lines: what is left decides."""

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        # Whether it raises is a rule, what it says is not.
        return ast.Raise(exc=None, cause=None)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.Assert(test=self.visit(node.test), msg=None)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        said = isinstance(node.value, ast.Call) and ast.unparse(node.value.func).startswith(("logger.", "log_", "warn"))
        # A branch may be left empty: the code is only compared, never run.
        return None if said or isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        # ``ast.unparse`` asks an assignment for its line.
        return None if node.value is None else ast.Assign([node.target], self.visit(node.value), lineno=1)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def bare(sources: Sources, places: Sequence[str]) -> str:
    """Return the code of all places, without what decides nothing."""
    nodes = [sources.find(*place.split("|")) for place in places]
    return "\n".join("" if each is None else ast.unparse(_Bare().visit(copy.deepcopy(each))) for each in nodes)


# vLLM ----------------------------------------------------------------------------------------------------------------

_LEVELS = tuple(f"OPTIMIZATION_LEVEL_0{level}" for level in range(4))
# One for each branch of ``get_batch_defaults`` at least: it names A100 and 12.1.
_DEVICES = {
    "48 GiB": (48, "l40", (8, 9)),
    "80 GiB": (80, "h100", (9, 0)),
    "A100 of 80 GiB": (80, "a100", (8, 0)),
    "12.1": (119, "gb10", (12, 1)),
    "180 GiB": (180, "b200", (10, 0)),
}


def _vllm_sizes(sources: Sources, seqs: int, tokens: int, k: int = 0, family: int = 90, tensor: int = 1) -> list[int]:
    """Return the sizes that a release's own function makes."""
    platform = SimpleNamespace(is_device_capability_family=lambda given: given == family)
    function = sources.function("config/vllm.py:VllmConfig._set_cudagraph_sizes", current_platform=platform)
    assert function is not None
    compilation = SimpleNamespace(
        cudagraph_mode="FULL",
        max_cudagraph_capture_size=None,
        cudagraph_capture_sizes=None,
        pass_config=SimpleNamespace(enable_sp=tensor > 1),
        post_init_cudagraph_sizes=lambda: None,
    )
    drafts = SimpleNamespace(num_speculative_tokens=k, uses_dynamic_speculative_decoding=lambda: False)
    function(
        SimpleNamespace(
            # Not ``Anything``, which is true and would turn graphs off.
            model_config=SimpleNamespace(enforce_eager=False),
            compilation_config=compilation,
            scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=tokens),
            parallel_config=SimpleNamespace(tensor_parallel_size=tensor),
            speculative_config=drafts if k else None,
            num_speculative_tokens=k,
            uniform_decode_query_len=1 + k,
            performance_mode="balanced",
            update_sizes_for_sequence_parallelism=lambda sizes: [each for each in sizes if each % tensor == 0],
        )
    )
    return list(compilation.cudagraph_capture_sizes)


def _vllm_budgets(sources: Sources) -> dict[str, list[int]]:
    """Return the tokens and requests that ``vllm serve`` starts from, by device."""
    found = {}
    for name, (memory, device, capability) in _DEVICES.items():
        platform = SimpleNamespace(
            get_device_total_memory=lambda memory=memory: memory << 30,
            get_device_name=lambda device=device: device,
            is_device_capability=lambda given, capability=capability: given == capability,
            is_tpu=lambda: False,
            is_cpu=lambda: False,
        )
        context = SimpleNamespace(LLM_CLASS="class", OPENAI_API_SERVER="server")
        function = sources.function(
            "engine/arg_utils.py:EngineArgs.get_batch_defaults",
            current_platform=platform,
            GiB_bytes=1 << 30,
            UsageContext=context,
        )
        assert function is not None
        found[name] = [each["server"] for each in function(None, 1)]
    return found


def _vllm_values(sources: Sources) -> dict[str, Any]:
    # Read, not run: a level is a dictionary that names its mode.
    levels = [sources.find(f"config/vllm.py:{level}") for level in _LEVELS]
    modes = [re.search(r"CUDAGraphMode\.(\w+)", ast.unparse(each)) for each in levels if each is not None]
    listed = sources.find("config/vllm.py:DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES")
    chooses = sources.find("config/vllm.py:VllmConfig.use_v2_model_runner") is not None
    names = sorted(re.findall(r"'(\w+)'", ast.unparse(listed))) if listed is not None else []
    rule = sources.find("config/vllm.py:VllmConfig._is_default_v2_model_runner_model")
    names += ["dense"] if rule is not None and "not model_config.is_moe" in ast.unparse(rule) else []
    return {
        # Limits beyond each ceiling, so that the ceiling shows.
        "largest_size": _vllm_sizes(sources, 4096, 1 << 20)[-1],
        "largest_size_sm100": _vllm_sizes(sources, 4096, 1 << 20, family=100)[-1],
        # Numbers that no step of 8 or 16 comes to: only a rule of its own makes them sizes.
        "requests_are_a_size": 100 in _vllm_sizes(sources, 100, 8192),
        "widths_are_sizes": 51 in _vllm_sizes(sources, 100, 8192, k=2) or 300 in _vllm_sizes(sources, 100, 8192, k=2),
        "budget_is_a_size": 99 in _vllm_sizes(sources, 1024, 99),
        # 4 tokens cannot be split evenly over 8 ranks.
        "sequence_parallel_sizes": 4 not in _vllm_sizes(sources, 100, 8192, tensor=8),
        "budgets": _vllm_budgets(sources),
        "modes_by_level": [each[1] for each in modes if each],
        "v2_architectures": names if listed is not None else ["all"] if chooses else [],
    }


def _vllm_flags(sources: Sources) -> set[str]:
    """Return every flag that the argument files name, and those made of the front end's fields."""
    found: set[str] = set()
    for file in ("engine/arg_utils.py", *sources.files("entrypoints")):
        tree = sources.tree(file)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if re.fullmatch(r"--?[a-z][a-z0-9-]*", node.value) else set()
            elif isinstance(node, ast.ClassDef) and node.name.endswith(("Args", "Arguments")):
                fields = [name for each in node.body if isinstance(each, ast.AnnAssign) for name in _bound(each)]
                found |= {f"--{name.replace('_', '-')}" for name in fields}
    return found


# What is asked for its values is no part: its answers are in the table.
VLLM_PARTS = {
    "the choice of the model runner": (
        "config/vllm.py:VllmConfig.use_v2_model_runner",
        "config/vllm.py:VllmConfig._get_v2_model_runner_unsupported_features",
    ),
    "the mode by the attention backends": (
        "config/compilation.py:CompilationConfig.resolve_cudagraph_mode_and_sizes",
        "config/compilation.py:CompilationConfig.adjust_cudagraph_sizes_for_spec_decode",
        "config/compilation.py:CompilationConfig.set_splitting_ops_for_v1",
    ),
    "the rewrites between these": ("config/vllm.py:VllmConfig.__post_init__",),
    "speculation": ("config/speculative.py:SpeculativeConfig.__post_init__",),
    "the choice of the attention backend": (
        "platforms/cuda.py:_get_backend_priorities",
        "platforms/cuda.py:CudaPlatformBase.get_attn_backend_cls",
        "v1/attention/backends/flashinfer.py:FlashInferMetadataBuilder.get_cudagraph_support",
        "v1/attention/backends/flash_attn.py:FlashAttentionMetadataBuilder._cudagraph_support",
    ),
    "model runner V2's graphs": (
        "v1/worker/gpu/cudagraph_utils.py:CudaGraphManager._init_candidates",
        "v1/worker/gpu/cudagraph_utils.py:CudaGraphManager.dispatch",
        "v1/worker/gpu/cudagraph_utils.py:_is_compatible",
    ),
    "model runner V1's graphs": (
        "v1/cudagraph_dispatcher.py:CudagraphDispatcher.dispatch",
        "v1/cudagraph_dispatcher.py:CudagraphDispatcher.initialize_cudagraph_keys",
    ),
    "drafters' graphs": (
        "v1/worker/gpu/spec_decode/target_dependent_ar/cudagraph_utils.py"
        "|v1/worker/gpu/spec_decode/autoregressive/cudagraph_utils.py"
        "|v1/worker/gpu/spec_decode/autoregressive/cudagraph.py|v1/worker/gpu/spec_decode/eagle/cudagraph.py",
    ),
    "agreement of data-parallel ranks": ("v1/worker/gpu/dp_utils.py",),
}

# SGLang --------------------------------------------------------------------------------------------------------------

_HOOK, _ARGS = "srt/arg_groups/cuda_graph_hook.py", "srt/server_args.py:ServerArgs"
_MEMORY = ("srt/arg_groups/memory_hook.py:handle_gpu_memory_settings", f"{_ARGS}._handle_gpu_memory_settings")
_DECODES = (
    f"{_HOOK}:generate_decode_cuda_graph_batch_sizes",
    f"{_ARGS}._generate_decode_cuda_graph_batch_sizes",
    f"{_ARGS}._generate_cuda_graph_batch_sizes",
)
_PREFILLS = (
    f"{_HOOK}:generate_prefill_cuda_graph_batch_sizes",
    f"{_ARGS}._generate_prefill_cuda_graph_batch_sizes",
    f"{_ARGS}._generate_piecewise_cuda_graph_tokens",
)


def _sglang_memory(sources: Sources, memory: int, **given: Any) -> tuple[int, int, int]:
    """Return the chunk, the largest decode batch and the largest prefill that a device's memory leads to."""
    latent = given.pop("latent", False)
    phases = Unset(decode=Unset(), prefill=Unset())
    lists = ("cuda_graph_batch_sizes", "cpu_graph_batch_sizes", "piecewise_cuda_graph_tokens")
    lists += ("decode_cuda_graph_batch_sizes", "prefill_cuda_graph_batch_sizes")
    # With the fraction given, the function skips the part that asks for the model.
    view = Unset(tp_size=1, pp_size=1, dp_size=1, device="cuda", mem_fraction_static=0.5, model_path="x")
    vars(view).update({f"_generate_{name}": lambda *_: [1] for name in lists})
    vars(view).update(cuda_graph_config=phases, _cuda_graph_config_locked=set(), use_mla_backend=lambda: latent)
    vars(view).update(given)
    phases = view.cuda_graph_config

    def declare(_: Any, __: str, **values: Any) -> None:
        vars(view).update(values)

    function = sources.function(
        *_MEMORY,
        resolving_view=lambda _: view,
        declare_resolution=declare,
        get_device_memory_capacity=lambda _: memory << 10,
        use_mla_backend=lambda _: latent,
        # The function sets a copy, and what it sets is read below: here the copy is the same record.
        copy=SimpleNamespace(deepcopy=lambda value: value),
        _DEFAULT_PP_PREFILL_CUDA_GRAPH_MAX_TOKENS=8192,
    )
    assert function is not None
    # Older releases pass the memory; newer ones ask for it.
    function(*([view] if function.__code__.co_argcount == 1 else [view, memory << 10]))
    # Before there was one record for both phases, each had a flag.
    decode = phases.decode.max_bs if phases.decode.max_bs is not None else view.cuda_graph_max_bs
    prefill = phases.prefill.max_bs if phases.prefill.max_bs is not None else view.piecewise_cuda_graph_max_tokens
    return view.chunked_prefill_size, decode, prefill


def _sglang_sizes(sources: Sources, places: Sequence[str], most: int, **given: Any) -> list[int]:
    """Return the sizes that a release's own function makes up to ``most``."""
    view = Unset(cuda_graph_max_bs=most, piecewise_cuda_graph_max_tokens=most, **given)
    function = sources.function(*places, resolving_view=lambda _: view)
    assert function is not None
    values = {"server_args": view, "self": view, "max_bs": most}
    return list(function(*(values[name] for name in function.__code__.co_varnames[: function.__code__.co_argcount])))


def _sglang_values(sources: Sources) -> dict[str, Any]:
    # One for each range of memory that the function tells apart.
    memories = (16, 24, 48, 80, 141, 180)
    wide = 16384
    return {
        "chunk_by_memory": {f"{memory} GiB": _sglang_memory(sources, memory)[0] for memory in memories},
        "decode_max_by_memory": {
            f"{memory} GiB": [_sglang_memory(sources, memory, tp_size=tensor)[1] for tensor in (1, 4)]
            for memory in memories
        },
        "decode_max_by_requests": _sglang_memory(sources, 80, max_running_requests=100)[1] == 100,
        "prefill_max_of_latent": [
            _sglang_memory(sources, 80, latent=True, chunked_prefill_size=chunk)[2] for chunk in (512, wide)
        ],
        "prefill_max_of_stages": _sglang_memory(
            sources, 80, pp_size=2, chunked_prefill_size=wide, cuda_graph_config=_breakable()
        )[2],
        "prefill_max_of_llama_2": _sglang_memory(sources, 80, model_path="llama-2", chunked_prefill_size=wide)[2],
        # Up to here each list has come to its widest step.
        "decode_sizes": _steps(_sglang_sizes(sources, _DECODES, 1024)),
        "decode_sizes_of_speculation": _steps(_sglang_sizes(sources, _DECODES, 1024, speculative_algorithm="EAGLE")),
        "prefill_sizes": _steps(_sglang_sizes(sources, _PREFILLS, wide)),
        "prefill_graphs": _sglang_prefill_graphs(sources),
    }


def _breakable() -> Unset:
    # Of both stand-ins for a name the same: in the function it is compared with ``Backend.BREAKABLE``.
    class Same(Anything):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Anything)

        __hash__ = object.__hash__

    return Unset(decode=Unset(), prefill=Unset(backend=Same()))


def _sglang_prefill_graphs(sources: Sources) -> str:
    """Return how prefills are captured by default."""
    file = "srt/model_executor/cuda_graph_config.py"
    found = sources.find(f"{file}:default_prefill_backend", f"{file}:CudaGraphConfig.prefill")
    # Read, not run: releases have it as a function, or as a field with a default.
    match = re.search(r"Backend\.(BREAKABLE|TC_PIECEWISE)", "" if found is None else ast.unparse(found))
    return "tc_piecewise" if match is None else match[1].lower()


def _steps(sizes: Sequence[int]) -> str:
    """Write a list by its steps: ``1 2 4 8 12 16 to 256 by 8``."""
    parts: list[str] = []
    at = 0
    while at < len(sizes):
        end = at + 1
        while end + 1 < len(sizes) and sizes[end + 1] - sizes[end] == sizes[end] - sizes[end - 1]:
            end += 1
        # Three sizes are shorter written out.
        if end - at > 2 and end < len(sizes):
            parts.append(f"{sizes[at]} to {sizes[end]} by {sizes[at + 1] - sizes[at]}")
            at = end + 1
        else:
            parts.append(str(sizes[at]))
            at += 1
    return " ".join(parts)


def _sglang_flags(sources: Sources) -> set[str]:
    """Return every flag that the argument files name, and those made of the fields of their records."""
    found: set[str] = set()
    for file in ("srt/server_args.py", *sources.files("srt/arg_groups")):
        tree = sources.tree(file)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if re.fullmatch(r"--[a-z][a-z0-9-]*", node.value) else set()
            elif isinstance(node, ast.ClassDef):
                fields = [name for each in node.body if isinstance(each, ast.AnnAssign) for name in _bound(each)]
                found |= {f"--{name.replace('_', '-')}" for name in fields}
    return found


SGLANG_PARTS = {
    "which graphs go together with what": (
        f"{_HOOK}:apply_cuda_graph_compatibility|{_ARGS}._apply_cuda_graph_compatibility"
        f"|{_ARGS}._handle_piecewise_cuda_graph",
    ),
    "the choice of the attention backend": (
        f"srt/arg_groups/attention_hook.py|{_ARGS}._handle_attention_backend_compatibility",
    ),
    "speculation": (f"srt/arg_groups/speculative_hook.py|{_ARGS}._handle_speculative_decoding",),
    "alignment and the request pool": (
        "srt/model_executor/runner/base_cuda_graph_runner.py:get_batch_sizes_to_capture"
        "|srt/model_executor/cuda_graph_runner.py:get_batch_sizes_to_capture",
    ),
    "which batch a decode graph serves": (
        "srt/model_executor/runner/decode_cuda_graph_runner.py:DecodeCudaGraphRunner.can_run_graph"
        "|srt/model_executor/runner/decode_cuda_graph_runner.py:DecodeCudaGraphRunner.can_run"
        "|srt/model_executor/cuda_graph_runner.py:CudaGraphRunner.can_run",
    ),
    "which batch a prefill graph serves": (
        "srt/model_executor/runner/prefill_cuda_graph_runner.py:PrefillCudaGraphRunner.can_run_graph"
        "|srt/model_executor/piecewise_cuda_graph_runner.py:PiecewiseCudaGraphRunner.can_run",
    ),
    "drafters' graphs": (
        "srt/speculative/eagle_draft_cuda_graph_runner.py",
        "srt/speculative/eagle_draft_extend_cuda_graph_runner.py",
    ),
}

ENGINES: Mapping[str, tuple[Callable[[Sources], Any], Callable[[Sources], set[str]], Mapping[str, Sequence[str]], str]]
ENGINES = {
    "vllm": (_vllm_values, _vllm_flags, VLLM_PARTS, "0.20"),
    "sglang": (_sglang_values, _sglang_flags, SGLANG_PARTS, "0.5.10"),
}


def releases(package: str, folder: Path) -> dict[str, Sources]:
    """Return the sources in a folder by release, newest first."""
    found = {}
    for place in folder.glob(f"{package}-*"):
        # What follows a ``+`` is the wheel's build, as ``+cu130``, and no part of the release.
        match = re.match(rf"{package}-([\d.]+(?:post\d+)?)(?:-.*whl)?$", place.name.replace("+", "-"))
        if match and (place.suffix == ".whl" or (place / package).is_dir()):
            found[match[1]] = Sources(package, place)
    return dict(sorted(found.items(), key=lambda item: number(item[0]), reverse=True))


def number(release: str) -> Key:
    """Return a release as numbers."""
    return tuple(map(int, re.findall(r"\d+", release)))


def changes(by_release: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values where they change, from the newest release back: each holds down to the next one."""
    rows = [*by_release.items()]
    # No value is None, so that the newest release always has a row.
    newer = [None, *(value for _, value in rows)]
    return {release: value for (release, value), before in zip(rows, newer, strict=False) if value != before}


def table(package: str, folder: Path) -> dict[str, Any]:
    """Return the table of all releases in a folder."""
    values, flags, parts, _ = ENGINES[package]
    every = releases(package, folder)
    rows = {release: values(sources) for release, sources in every.items()}
    names = {release: flags(sources) for release, sources in every.items()}
    newest = next(iter(names.values()))
    own = (ROOT / "engines" / package / "src" / f"capture_planner_{package}" / "emulation" / "flags.json").read_text()
    emulated = set(re.findall(r'"(--[a-z0-9-]+)"', own))
    since = {name: [each for each in every if name in names[each]][-1] for name in newest & emulated}
    oldest = [*every][-1]
    return {
        "releases": [*every],
        "values": {name: changes({each: row[name] for each, row in rows.items()}) for name in rows[oldest]},
        "code": {
            part: [*changes({each: bare(sources, places) for each, sources in every.items()})]
            for part, places in parts.items()
        },
        "flags": {name: first for name, first in sorted(since.items()) if first != oldest},
    }


def written(content: Mapping[str, Any], package: str) -> str:
    """Write a table as YAML, one change to a line."""
    import json

    lines = [
        f"# Made by tools/release_table.py from the wheels of {package}; see there what the parts of the code are.",
        "# A value holds from the release of its row down to the next row, newest first; so does a part's code.",
        f"releases: {json.dumps(content['releases'])}",
        "values:",
    ]
    for name, rows in content["values"].items():
        lines += [f"  {name}:", *(f"    {release}: {json.dumps(value)}" for release, value in rows.items())]
    lines += ["code:", *(f"  {json.dumps(part)}: {json.dumps(each)}" for part, each in content["code"].items())]
    lines += ["# The first release that has a flag; the others are older than this table.", "flags:"]
    lines += [f"  {name}: {release}" for name, release in content["flags"].items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    place = ROOT / "engines" / arguments.engine / "src" / f"capture_planner_{arguments.engine}" / "emulation"
    text = written(table(arguments.engine, arguments.folder), arguments.engine)
    (place / "by_release.yaml").write_text(text, encoding="utf-8")
    sys.stdout.write(f"{place / 'by_release.yaml'}: {len(text.splitlines())} lines\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
