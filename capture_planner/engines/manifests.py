"""The commands of servers in files that describe deployments: one for each component that starts something.

Read are containers at any depth (Kubernetes, LeaderWorkerSet, Docker Compose, Dynamo's graph deployments), KServe's
``LLMInferenceService``, values of the Helm charts of llm-d and of vLLM's production stack, kustomize's patches, vLLM's
recipes, recipes of srt-slurm, and Dockerfiles. A key that none of them has decides nothing.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from capture_planner import codec
from capture_planner.codec.documents import Node
from capture_planner.engines.parsing import as_words
from capture_planner.engines.shell import ShellCommand, ShellText, expand
from capture_planner.errors import InvalidDocument

_LOOKS_SO = re.compile(
    r"^\s*(?:-\s+)?[\"']?(?:args|command|containers|services|entrypoint|image|backend|variants|op|kind|modelSpec|base)[\"']?\s*:",
    re.MULTILINE,
)
_LIST = re.compile(r"\s*(?:[\[{]|-\s+[\"']?\S)")
_DOCKERFILE = re.compile(r"^FROM\s+(\S+)", re.MULTILINE | re.IGNORECASE)
_SETS = re.compile(r"^(ENTRYPOINT|CMD|ENV)\s+(.+)$", re.MULTILINE | re.IGNORECASE)
_GENERIC = frozenset(
    (
        *("spec", "template", "containers", "podTemplate", "extraPodSpec", "mainContainer", "services", "components"),
        *("leaderWorkerTemplate", "jobTemplate", "patches", "predictor", "data"),
    )
)
"""Keys that name no component."""


def container_commands(text: str, file: str = "") -> ShellText | None:
    """Return the commands in the text of a file; None where it is no such file, or has no command.

    :param file: its name, by which an engine finds a part of it.
    """
    if _DOCKERFILE.search(text) and _SETS.search(text):
        return ShellText((_dockerfile(text),))
    if not (_LOOKS_SO.search(text) or _LIST.match(text)):
        return None
    commands: list[ShellCommand] = []
    mounted: dict[str, str] = {}
    texts: dict[str, str] = {}
    line = 0
    for index, part in enumerate(re.split(r"^---.*\n", text, flags=re.MULTILINE)):
        try:
            node = codec.Document.parse(part, "the file").node
        except InvalidDocument:
            return None
        place = f"{file}#{index}"
        if _within(node.plain(), "kind") == "ConfigMap":
            held = _within(node.plain(), "data") or {}
            mounted |= {key: f"{place}/data/{key}" for key in held if file}
            texts |= {f"{_within(node.plain(), 'metadata', 'name')}/{key}": str(text) for key, text in held.items()}
            continue
        found = _commands(node, place)
        commands += [attrs.evolve(each, line=each.line + line) for each in found]
        line += part.count("\n") + 1
    named = (_mounted(each, mounted, texts) for each in _named_apart(commands))
    return ShellText(tuple(named)) if commands else None


def _named_apart(commands: Iterable[ShellCommand]) -> Iterator[ShellCommand]:
    """Yield commands with names that differ: ``decode``, ``decode-2``."""
    counts: Counter[str] = Counter()
    for each in commands:
        counts[each.component] += 1
        count = counts[each.component]
        yield attrs.evolve(each, component=f"{each.component}-{count}") if count > 1 and each.component else each


_IN_MAP = re.compile(r"\$\(ConfigMap/([^()]*)\)")
_PATH = re.compile(r"(?<![\w./-])/[\w./-]*")


def _mounted(command: ShellCommand, mounted: Mapping[str, str], texts: Mapping[str, str]) -> ShellCommand:
    """Return a command with what configuration maps hold: files by their paths in a container, and variables."""

    def filled(text: str) -> str:
        return _IN_MAP.sub(lambda match: texts.get(match[1], match[0]), text)

    def placed(text: str) -> str:
        return _PATH.sub(lambda match: mounted.get(match[0].rpartition("/")[2], match[0]), filled(text))

    given = {name: placed(text) for name, text in command.variables.items()}
    return attrs.evolve(command, words=tuple(map(placed, command.words)), variables=given)


def _commands(node: Node, place: str) -> Iterator[ShellCommand]:
    data = node.plain()
    # A list of arguments by itself, as it stands under ``args``.
    if isinstance(data, list) and data and not isinstance(data[0], Mapping):
        yield ShellCommand(words=tuple(map(str, data)))
    elif isinstance(data, list):
        yield from _patches(data) if "op" in data[0] and "path" in data[0] else _containers(node, ())
    elif isinstance(data, Mapping):
        for reader in (_slurm, _kserve, _llm_d, _stack, _recipe):
            found = list(reader(data, node, place))
            if found:
                yield from found
                return
        name = data.get("metadata", {}).get("name") if isinstance(data.get("metadata"), Mapping) else None
        yield from _containers(node, (str(name),) if name else ())


def _containers(node: Node, path: tuple[str, ...]) -> Iterator[ShellCommand]:
    """Yield the command of each mapping that has one, at any depth."""
    if isinstance(node.value, list):
        for each in node.value:
            named = each.value.get("name") if isinstance(each.value, dict) else None
            inside = path and path[-1] in ("containers", "initContainers")
            yield from _containers(each, path if named is None or inside else (*path, str(named.value)))
    elif isinstance(node.value, dict):
        data = node.plain()
        words = [*_words(data.get("entrypoint")), *_words(data.get("command")), *_words(data.get("args"))]
        if words:
            given = _variables(data.get("env") or data.get("environment"))
            yield _container(words, given, data.get("image"), path, _line(node, "args", "command", "entrypoint"))
            return
        for key, each in node.value.items():
            text = each.value
            if key == "patch" and isinstance(text, str):
                found = container_commands(text)
                yield from (attrs.evolve(each, line=node.line) for each in (found.commands if found else ()))
            else:
                yield from _containers(each, (*path, key))


def _container(
    words: Iterable[str], given: Mapping[str, str], image: object, path: Sequence[str], line: int
) -> ShellCommand:
    """Return a container's command, with its variables in the words where Kubernetes and Compose put them."""
    own = [re.sub(r"\$\((\w+)\)", lambda match: given.get(match[1], match[0]), word) for word in words]
    # A script's variables are the shell's to expand.
    own = [word if "\n" in word or " " in word else expand(word, given) for word in own]
    front = ["docker", "run", str(image)] if image else []
    names = [part for part in path if part not in _GENERIC]
    return ShellCommand(words=(*front, *own), variables=dict(given), component=names[-1] if names else "", line=line)


def _line(node: Node, *keys: str) -> int:
    """Return the line of the first of the keys that a mapping has."""
    return next((node.keys[key][0] for key in keys if key in node.keys), node.line)


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return shlex.split(value.replace("\\\n", " "))
    return [str(each) for each in value] if isinstance(value, list) else []


def _variables(value: Any) -> dict[str, str]:
    """Return the variables of a list of names and values, a list of assignments, or a mapping."""
    if isinstance(value, Mapping):
        return {str(name): str(each) for name, each in value.items()}
    found: dict[str, str] = {}
    for each in value if isinstance(value, list) else ():
        if isinstance(each, Mapping):
            held = _within(each, "valueFrom", "configMapKeyRef")
            text = f"$(ConfigMap/{_within(held, 'name')}/{_within(held, 'key')})" if held else each.get("value", "")
            found[str(each.get("name"))] = str(text)
        else:
            name, equals, text = str(each).partition("=")
            found |= {name: text} if equals else {}
    return found


def _within(data: Any, *keys: str | int) -> Any:
    """Return what stands behind keys, one inside the other; None where one is missing."""
    for key in keys:
        held = dict(enumerate(data)) if isinstance(data, list) else data
        data = held.get(key) if isinstance(held, Mapping) else None
    return data


def _dockerfile(text: str) -> ShellCommand:
    """Return what an image runs: the last ENTRYPOINT and CMD, or the base image's entry point with a CMD of flags."""
    joined = re.sub(r"\\\n", " ", text)
    parts: dict[str, tuple[str, int]] = {}
    given: dict[str, str] = {}
    for match in _SETS.finditer(joined):
        name, value = match[1].upper(), match[2].strip()
        if name == "ENV":
            given |= dict(word.split("=", 1) for word in shlex.split(value) if "=" in word)
        else:
            at = next((n for n, line in enumerate(text.split("\n"), 1) if line.upper().startswith(name)), 1)
            parts[name] = value, at
    words: list[str] = []
    for name in ("ENTRYPOINT", "CMD"):
        value = parts.get(name, ("", 1))[0]
        try:
            words += map(str, json.loads(value)) if value.startswith("[") else ["sh", "-c", value] * bool(value)
        except ValueError:
            words += [value]
    image = _DOCKERFILE.findall(text)[-1]
    front = () if "ENTRYPOINT" in parts else ("docker", "run", image)
    return ShellCommand(words=(*front, *words), variables=given, line=max((at for _, at in parts.values()), default=1))


def _patches(data: Sequence[Any]) -> Iterator[ShellCommand]:
    """Yield the arguments that a JSON patch sets or adds, as one command."""
    words: list[str] = []
    for each in data:
        place, value = str(_within(each, "path") or ""), _within(each, "value")
        if re.search(r"/(?:args|command)(?:/(?:-|\d+))?$", place):
            words += [str(one) for one in value] if isinstance(value, list) else [str(value)]
    if words:
        yield ShellCommand(words=tuple(words))


_ENGINES = ("vllm", "sglang", "trtllm")


def _slurm(data: Mapping[str, Any], node: Node, place: str) -> Iterator[ShellCommand]:
    """Yield the workers of srt-slurm: ``backend.TYPE_config`` has the flags of each role.

    Of a file with overrides these are the base's.
    """
    if isinstance(data.get("base"), Mapping):
        yield from _slurm(data["base"], node.value["base"], f"{place}/base")
        return
    kind = next((each for each in _ENGINES if _within(data, "backend", f"{each}_config")), "")
    roles = _within(data, "backend", f"{kind}_config")
    if not isinstance(roles, Mapping):
        return
    model = str(_within(data, "model", "path") or "model")
    for role, flags in roles.items():
        if not isinstance(flags, Mapping):
            continue
        given = _variables(_within(data, "backend", f"{role}_environment"))
        at = node.locate(("backend", f"{kind}_config", role))[0]
        # A folder in the container says nothing of the model, and the served name does.
        own = {key.replace("_", "-"): value for key, value in _merged(flags).items()}
        served = own.pop("served-model-name", None)
        repo = _within(data, "identity", "model", "repo")
        name = repo or served or own.get("model-path") or own.pop("model", None) or model
        if kind == "trtllm":
            words = [str(name), "--config", f"{place}/backend/{kind}_config/{role}"]
        else:
            own.pop("model-path", None)
            words = [*(["--model-path"] if kind == "sglang" else []), str(name), *as_words(own)]
        # A worker of Dynamo takes the engine's flags and its own.
        words = ["python", "-m", f"dynamo.{kind}", *words]
        image = str(_within(data, "model", "container") or "")
        command = ShellCommand(words=tuple(words), variables=given, component=str(role), line=at)
        yield attrs.evolve(command, image=image) if ":" in image else command


def _merged(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with what YAML's ``<<`` merges into it."""
    merged = flags.get("<<") or {}
    own = {key: value for key, value in flags.items() if key != "<<"}
    parts = reversed(merged) if isinstance(merged, list) else [merged]
    return {key: value for each in (*map(_merged, parts), own) for key, value in each.items()} if merged else own


def _serve(model: str, parallel: Any) -> list[str]:
    """Return the beginning of vLLM's command, with the ranks that a chart or KServe states."""
    words = ["vllm", "serve", re.sub(r"^\w+://", "", model)]
    for key, flag in (("tensor", "--tensor-parallel-size"), ("data", "--data-parallel-size")):
        value = _within(parallel, key)
        # Recipes may have a number for each machine.
        words += [flag, str(value)] if isinstance(value, int | str) and value != 1 else []
    return [*words, *(["--enable-expert-parallel"] if _within(parallel, "expert") else [])]


def _kserve(data: Mapping[str, Any], node: Node, place: str) -> Iterator[ShellCommand]:
    """Yield decode and prefill of an ``LLMInferenceService``, whose own template starts vLLM."""
    if data.get("kind") != "LLMInferenceService":
        return
    spec, served = data.get("spec"), str(_within(data, "spec", "model", "uri") or "model")
    name = _within(data, "spec", "model", "name")
    # A volume or a bucket says nothing of the model, and its name does.
    model = str(name) if name and not served.startswith("hf://") else served
    for role, path in (("decode", ()), ("prefill", ("prefill",))):
        part = _within(spec, *path)
        if not isinstance(part, Mapping):
            continue
        container = _within(part, "template", "containers", 0) or {}
        given = _variables(_within(container, "env"))
        extra = shlex.split(given.pop("VLLM_ADDITIONAL_ARGS", "").replace("\\\n", " "))
        command = _words(container.get("command"))
        begin = command or [*_serve(model, part.get("parallelism")), *extra]
        at = node.locate(("spec", *path, "template"))[0]
        yield _container([*begin, *_words(container.get("args"))], given, container.get("image"), (role,), at)


def _llm_d(data: Mapping[str, Any], node: Node, place: str) -> Iterator[ShellCommand]:
    """Yield decode and prefill of the values of llm-d's chart, which begins vLLM's command itself."""
    model = _within(data, "modelArtifacts", "uri") or _within(data, "modelArtifacts", "name")
    for role in ("decode", "prefill") if model else ():
        part = data.get(role)
        if not isinstance(part, Mapping) or part.get("create") is False:
            continue
        for index, container in enumerate(part.get("containers") or ()):
            begin = _words(container.get("command"))
            if container.get("modelCommand") == "vllmServe":
                begin = _serve(str(model), part.get("parallelism"))
            words = [*begin, *_words(container.get("args"))]
            if words:
                at = node.locate((role, "containers", index))[0]
                given = _variables(container.get("env"))
                yield _container(words, given, container.get("image"), (role,), at)


_STACK = {"maxModelLen": "max-model-len", "dtype": "dtype", "tensorParallelSize": "tensor-parallel-size"} | {
    "maxNumSeqs": "max-num-seqs",
    "maxNumBatchedTokens": "max-num-batched-tokens",
    "pipelineParallelSize": "pipeline-parallel-size",
    "enableChunkedPrefill": "enable-chunked-prefill",
    "enablePrefixCaching": "enable-prefix-caching",
    "maxLoras": "max-loras",
}


def _stack(data: Mapping[str, Any], node: Node, place: str) -> Iterator[ShellCommand]:
    """Yield the models of the values of vLLM's production stack."""
    for index, each in enumerate(_within(data, "servingEngineSpec", "modelSpec") or ()):
        if not isinstance(each, Mapping) or not each.get("modelURL"):
            continue
        config = each.get("vllmConfig") or {}
        flags = {_STACK[key]: value for key, value in config.items() if key in _STACK}
        words = [*_serve(str(each["modelURL"]), None), *as_words(flags), *_words(config.get("extraArgs"))]
        words += ["--enable-lora"] if each.get("enableLoRA") else []
        image = f"{each.get('repository', 'vllm/vllm-openai')}:{each['tag']}" if each.get("tag") else None
        at = node.locate(("servingEngineSpec", "modelSpec", index))[0]
        yield _container(words, _variables(each.get("env")), image, (str(each.get("name", index)),), at)


def _recipe(data: Mapping[str, Any], node: Node, place: str) -> Iterator[ShellCommand]:
    """Yield the variants of one of vLLM's recipes: the model's arguments, the variant's, and the usual features'."""
    model, variants = _within(data, "model", "model_id"), data.get("variants")
    if not model or not isinstance(variants, Mapping):
        return
    usual = [
        word
        for name, each in (data.get("features") or {}).items()
        if name not in (data.get("opt_in_features") or ())
        for word in _words(_within(each, "args"))
    ]
    ranks = _within(data, "strategy_overrides", "single_node_tp", "tp")
    for name, variant in variants.items():
        own = [*_words(_within(data, "model", "base_args")), *_words(_within(variant, "extra_args")), *usual]
        words = [*_serve(str(_within(variant, "model_id") or model), {"tensor": ranks}), *own]
        given = _variables(_within(data, "model", "base_env")) | _variables(_within(variant, "extra_env"))
        at = node.locate(("variants", name))[0]
        yield ShellCommand(words=tuple(words), variables=given, component=str(name), line=at)
