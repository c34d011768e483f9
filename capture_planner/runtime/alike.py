"""What has to be the same on all ranks that run a plan: what they are asked for, and what they run it with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch

from capture_planner.plugins.registry import Registry
from capture_planner.records._base import digest
from capture_planner.records.fingerprint import digest_of
from capture_planner.records.plan import Plan
from capture_planner.runtime import host
from capture_planner.runtime.serving.workload import Request

DECIDING = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
"""Variables that change which collectives run."""

PACKAGES = ("capture-planner", "transformers", "triton")


def start_facts(plan: Plan, registry: Registry, choices: object) -> dict[str, str]:
    """Return what is compared before anything is loaded: digests, versions, devices, choices.

    :param choices: an attrs value; ``model`` is compared by its files, and a folder to write into not at all.
    """
    used = {group.backend for role in plan.roles for group in role.groups}
    here = host.facts()
    facts = {"plan": digest(plan), "environment": digest(plan.environment)}
    facts |= {f"backend {name}": registry[name].version for name in sorted(used & set(registry))}
    facts |= {name: here[name] for name in ("device", "python", "torch", "threads", "cuda", "driver") if name in here}
    facts |= {name: host.installed_version(name) or "not installed" for name in PACKAGES}
    if torch.cuda.is_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call, unused-ignore]
    facts |= {name: os.environ.get(name, "not set") for name in DECIDING}
    chosen = attrs.asdict(choices, recurse=False)  # type: ignore[arg-type]
    chosen.pop("dump_graphs", None)
    facts["model"] = _model(chosen.pop("model", None))
    return facts | {f"the choice {name}": str(value) for name, value in chosen.items()}


def request_facts(requests: Sequence[Request]) -> dict[str, str]:
    """Return what is compared before requests are served, since files of prompts may differ between machines."""
    return {"requests": f"{len(requests)} with the digest {digest_of(*requests)}"}


def _model(source: Path | None) -> str:
    """Return the digest of a model's configuration, and of the names and sizes of its other files."""
    if source is None:
        return "random weights"
    config = source / "config.json" if source.is_dir() else source
    if not config.is_file():
        return "missing"
    others = sorted(source.glob("*.safetensors*")) if source.is_dir() else []
    content = hashlib.sha256(config.read_bytes()).hexdigest()
    return digest_of(content, *(f"{path.name} {path.stat().st_size}" for path in others))
