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
from capture_planner.engines.parsing import as_words, refusal
from capture_planner.engines.recipe_variants import RESOLVE, variants
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
    """Return the commands in the text of a file, or None; ``file``: its name, by which an engine finds a part of it."""
    if _DOCKERFILE.search(text) and _SETS.search(text):
        return ShellText((_dockerfile(text),))
    # Most texts are command lines, and to parse each as YAML would be slow.
    if not (_LOOKS_SO.search(text) or _LIST.match(text)):
        return None
    commands: list[ShellCommand] = []
    mounted: dict[str, str] = {}
    texts: dict[str, str] = {}
    line = 0
    for index, (node, lines) in enumerate(documents(text) or ()):
        place = f"{file}#{index}"
        if within(node.plain(), "kind") == "ConfigMap":
            held = within(node.plain(), "data") or {}
            mounted |= {key: f"{place}/data/{key}" for key in held if file}
            texts |= {f"{within(node.plain(), 'metadata', 'name')}/{key}": str(text) for key, text in held.items()}
        else:
            found = document_commands(node, place)
            commands += [attrs.evolve(each, line=each.line + line, at=(index, *each.at)) for each in found]
        line += lines
    named = (_mounted(each, mounted, texts) for each in _named_apart(commands))
    return ShellText(tuple(named)) if commands else None


def document_texts(text: str) -> list[str]:
    """Return the text of each document of a file: comments in front of the first one count as one."""
    return re.split(r"^---.*\n", text, flags=re.MULTILINE)


def documents(text: str) -> list[tuple[Node, int]] | None:
    """Return each document of a file with its number of lines; None where one is no YAML."""
    try:
        return [(codec.Document.parse(part, "the file").node, part.count("\n") + 1) for part in document_texts(text)]
    except InvalidDocument:
        return None


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


def document_commands(node: Node, place: str) -> Iterator[ShellCommand]:
    """Yield the commands of one document, each with the path of its container in it."""
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


def _containers(
    node: Node, names: tuple[str, ...], at: tuple[str | int, ...] = (), kind: str = ""
) -> Iterator[ShellCommand]:
    """Yield the command of each mapping that has one, at any depth; ``names`` and ``kind`` are of what it is in."""
    if isinstance(node.value, list):
        for index, each in enumerate(node.value):
            held = each.plain() if isinstance(each.value, dict) else {}
            # An object in a list of them has its name among its metadata.
            named = held.get("name") or within(held, "metadata", "name")
            inside = at and at[-1] == "containers"
            outer = names if named is None or inside else (*names, str(named))
            yield from _containers(each, outer, (*at, index), kind)
    elif isinstance(node.value, dict):
        data = node.plain()
        kind = str(data.get("kind") or kind)
        words = [*_words(data.get("entrypoint")), *_words(data.get("command")), *_words(data.get("args"))]
        if words:
            given = _variables(data.get("env") or data.get("environment"))
            keys = ("args", "command", "entrypoint")
            line = next((node.keys[key][0] for key in keys if key in node.keys), node.line)
            found = _container(words, given, data.get("image"), names, line)
            form = "dynamo" if kind == "DynamoGraphDeployment" else "kubernetes"
            yield attrs.evolve(found, form=form if kind else "", at=at)
            return
        for key, each in node.value.items():
            text = each.value
            if key == "patch" and isinstance(text, str):
                patched = container_commands(text)
                yield from (attrs.evolve(one, line=node.line, form="") for one in (patched.commands if patched else ()))
            # What runs before the server is none.
            elif key not in ("initContainers", "initContainer"):
                yield from _containers(each, (*names, key), (*at, key), kind)


def _container(
    words: Iterable[str], given: Mapping[str, str], image: object, path: Sequence[str], line: int
) -> ShellCommand:
    """Return a container's command, with its variables in the words where Kubernetes and Compose put them."""
    own = [re.sub(r"\$\((\w+)\)", lambda match: given.get(match[1], match[0]), word) for word in words]
    # A script's variables are the shell's to expand.
    own = [word if "\n" in word or " " in word else expand(word, given.get) for word in own]
    front = ["docker", "run", str(image)] if image else []
    names = [part for part in path if part not in _GENERIC]
    return ShellCommand(words=(*front, *own), variables=dict(given), component=names[-1] if names else "", line=line)


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
            held = within(each, "valueFrom", "configMapKeyRef")
            text = f"$(ConfigMap/{within(held, 'name')}/{within(held, 'key')})" if held else each.get("value", "")
            found[str(each.get("name"))] = str(text)
        else:
            name, equals, text = str(each).partition("=")
            found |= {name: text} if equals else {}
    return found


def within(data: Any, *keys: str | int) -> Any:
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
            # Line numbers in the joined text differ from the file's.
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
    """Yield the arguments that a JSON patch sets or adds, as one command, with the variables that it adds."""
    words: list[str] = []
    given: dict[str, str] = {}
    for each in data:
        place, value = str(within(each, "path") or ""), within(each, "value")
        if re.search(r"/(?:args|command)(?:/(?:-|\d+))?$", place):
            words += [str(one) for one in value] if isinstance(value, list) else [str(value)]
        elif re.search(r"/env(?:/(?:-|\d+))?$", place):
            given |= _variables(value if isinstance(value, list) else [value])
    if words:
        yield ShellCommand(words=tuple(words), variables=given)


_ENGINES = ("vllm", "sglang", "trtllm")


def _slurm(data: Mapping[str, Any], node: Node, place: str) -> Iterator[ShellCommand]:
    """Yield the workers of a recipe of srt-slurm, of each variant: ``backend.TYPE_config`` has the flags of a role."""
    for variant in variants(data):
        kind = next((each for each in _ENGINES if within(variant.data, "backend", f"{each}_config")), "")
        roles = within(variant.data, "backend", f"{kind}_config")
        model = str(within(variant.data, "model", "path") or "model")
        for role, flags in roles.items() if isinstance(roles, Mapping) else ():
            if not isinstance(flags, Mapping):
                continue
            given = _variables(within(variant.data, "backend", f"{role}_environment"))
            # A folder in the container says nothing of the model, and the served name does.
            own = {key.replace("_", "-"): value for key, value in _merged(flags).items()}
            served = own.pop("served-model-name", None)
            repo = within(variant.data, "identity", "model", "repo")
            name = repo or served or own.get("model-path") or own.pop("model", None) or model
            keys = ("backend", f"{kind}_config", str(role))
            if kind == "trtllm":
                # Its options are a file, and those of an override are in none.
                if variant.name not in ("", "base"):
                    raise refusal(variant.name, "a variant of TensorRT-LLM's options is no part of the file", RESOLVE)
                words = [str(name), "--config", "/".join(filter(None, (place, variant.key, *keys)))]
            else:
                own.pop("model-path", None)
                words = [*(["--model-path"] if kind == "sglang" else []), str(name), *as_words(own)]
            image = str(within(variant.data, "model", "container") or "")
            yield ShellCommand(
                # A worker of Dynamo takes the engine's flags and its own.
                words=("python", "-m", f"dynamo.{kind}", *words),
                variables=given,
                image=image if ":" in image else None,
                component=f"{variant.name}-{role}" if variant.name else str(role),
                line=node.locate((*filter(None, (variant.key,)), *keys))[0],
            )


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
        value = within(parallel, key)
        # Recipes may have a number for each machine.
        words += [flag, str(value)] if isinstance(value, int | str) and value != 1 else []
    return [*words, *(["--enable-expert-parallel"] if within(parallel, "expert") else [])]


def _kserve(data: Mapping[str, Any], node: Node, place: str) -> Iterator[ShellCommand]:
    """Yield decode and prefill of an ``LLMInferenceService``, whose own template starts vLLM."""
    if data.get("kind") not in ("LLMInferenceService", "LLMInferenceServiceConfig"):
        return
    spec, served = data.get("spec"), str(within(data, "spec", "model", "uri") or "model")
    name = within(data, "spec", "model", "name")
    # A volume or a bucket says nothing of the model, and its name does.
    model = str(name) if name and not served.startswith("hf://") else served
    for role, path in (("decode", ()), ("prefill", ("prefill",))):
        part = within(spec, *path)
        if not isinstance(part, Mapping):
            continue
        container = within(part, "template", "containers", 0) or {}
        given = _variables(within(container, "env"))
        # KServe's own template puts this variable behind the arguments of vLLM.
        extra = shlex.split(given.pop("VLLM_ADDITIONAL_ARGS", "").replace("\\\n", " "))
        command = _words(container.get("command"))
        begin = command or [*_serve(model, part.get("parallelism")), *extra]
        at = ("spec", *path, "template")
        words = [*begin, *_words(container.get("args"))]
        found = _container(words, given, container.get("image"), (role,), node.locate(at)[0])
        yield attrs.evolve(found, form="kserve", at=(*at, "containers", 0))


def _llm_d(data: Mapping[str, Any], node: Node, place: str) -> Iterator[ShellCommand]:
    """Yield decode and prefill of the values of llm-d's chart, which begins vLLM's command itself."""
    model = within(data, "modelArtifacts", "uri") or within(data, "modelArtifacts", "name")
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
                at = (role, "containers", index)
                given = _variables(container.get("env"))
                found = _container(words, given, container.get("image"), (role,), node.locate(at)[0])
                yield attrs.evolve(found, form="helm", at=at)


_STACK = (
    *("maxModelLen", "dtype", "tensorParallelSize", "pipelineParallelSize", "maxNumSeqs", "maxNumBatchedTokens"),
    *("enableChunkedPrefill", "enablePrefixCaching", "maxLoras"),
)
"""Keys of the production stack that are flags of vLLM in camel case."""


def _stack(data: Mapping[str, Any], node: Node, place: str) -> Iterator[ShellCommand]:
    """Yield the models of the values of vLLM's production stack."""
    for index, each in enumerate(within(data, "servingEngineSpec", "modelSpec") or ()):
        if not isinstance(each, Mapping) or not each.get("modelURL"):
            continue
        config = each.get("vllmConfig") or {}
        flags = {re.sub("[A-Z]", r"-\g<0>", key).lower(): value for key, value in config.items() if key in _STACK}
        words = [*_serve(str(each["modelURL"]), None), *as_words(flags), *_words(config.get("extraArgs"))]
        words += ["--enable-lora"] if each.get("enableLoRA") else []
        image = f"{each.get('repository', 'vllm/vllm-openai')}:{each['tag']}" if each.get("tag") else None
        at = ("servingEngineSpec", "modelSpec", index)
        given, name = _variables(each.get("env")), str(each.get("name", index))
        found = _container(words, given, image, (name,), node.locate(at)[0])
        yield attrs.evolve(found, form="helm", at=at)


def _recipe(data: Mapping[str, Any], node: Node, place: str) -> Iterator[ShellCommand]:
    """Yield the variants of one of vLLM's recipes: the model's arguments, the variant's, and the usual features'."""
    model, variants = within(data, "model", "model_id"), data.get("variants")
    if not model or not isinstance(variants, Mapping):
        return
    usual = [
        word
        for name, each in (data.get("features") or {}).items()
        if name not in (data.get("opt_in_features") or ())
        for word in _words(within(each, "args"))
    ]
    ranks = within(data, "strategy_overrides", "single_node_tp", "tp")
    for name, variant in variants.items():
        own = [*_words(within(data, "model", "base_args")), *_words(within(variant, "extra_args")), *usual]
        words = [*_serve(str(within(variant, "model_id") or model), {"tensor": ranks}), *own]
        given = _variables(within(data, "model", "base_env")) | _variables(within(variant, "extra_env"))
        at = node.locate(("variants", name))[0]
        yield ShellCommand(words=tuple(words), variables=given, component=str(name), line=at)
