"""Plans put into deployments: what a manifest or a chart's values lack, so that the plugin in the engine runs a plan.

A pod gets the plan from a ConfigMap: a volume, its mount, the variable that names the file, and the plan's digest among
the pod's annotations, so that another plan rolls the pods; and ``check`` as an init container. Where these stand:

- Kubernetes: in the pod template around the container, as of a Deployment. A LeaderWorkerSet (v1) has two.
- KServe v0.20, ``LLMInferenceService`` (serving.kserve.io/v1alpha1 and v1alpha2, llm_inference_service_types.go):
  ``template`` and ``worker`` are pod specs, and ``annotations`` next to them are the pods'.
- Dynamo, ``DynamoGraphDeployment``: in nvidia.com/v1alpha1 (common.go) ``extraPodSpec`` with a ``mainContainer``, and
  ``extraPodMetadata`` next to it; in v1beta1 a pod template.
- Charts: vllm-stack 0.1.12 (deployment-vllm-multi.yaml) and llm-d-modelservice 0.4.0 (decode-deployment.yaml). Both
  deploy ``extraObjects``, which they expand as templates.

Kustomize 5.5 merges lists of built-in kinds by keys and replaces those of all others, and Helm replaces every list. So
a patch is made for one manifest: JSON patches (RFC 6902) that first test whose container they change, or whole lists.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from capture_planner import codec
from capture_planner.analysis.lint import lint
from capture_planner.analysis.lint.core import Severity
from capture_planner.codec.documents import node_of
from capture_planner.engines.engine import Engine
from capture_planner.engines.launch import PLAN
from capture_planner.engines.manifests import document_commands, documents, within
from capture_planner.engines.shell import ShellCommand
from capture_planner.errors import FlagError, InvalidValue, Problem
from capture_planner.records._base import digest
from capture_planner.records.plan import Plan

FOLDER = "/etc/capture-planner"
"""Folder of the plan in a container."""
FILE = "plan.yaml"
ANNOTATION = "capture-planner/plan-digest"
VOLUME = "capture-plan"
CHECK = "capture-planner-check"
"""Name of the init container."""

MOST_BYTES = 1 << 20
"""Bytes that a ConfigMap holds (kubernetes.io/docs/concepts/configuration/configmap)."""
MOST_APPLIED = 1 << 18
"""Bytes of annotations; ``kubectl apply`` keeps there what it applied, without ``--server-side``."""

_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?")

KeyPath = tuple[str | int, ...]


@attrs.frozen(kw_only=True)
class PodPlaces:
    """Where the parts of a pod stand: paths in an object, or in a chart's values."""

    container: KeyPath
    volumes: KeyPath
    annotations: KeyPath
    init: KeyPath
    """Init containers, or the only one that vLLM's production stack takes."""
    mounts: str = "volumeMounts"
    """Key of a container's mounts."""
    args: KeyPath = ("args",)
    """Keys of the server's arguments in the container."""


@attrs.frozen(kw_only=True)
class PlanPatch:
    """A plan in one component of a deployment."""

    component: ShellCommand
    target: Mapping[str, Any]
    """The object, or the values, without the plan."""
    operations: tuple[Mapping[str, Any], ...]
    """JSON patch of the target."""
    config: Mapping[str, Any]
    """The ConfigMap with the plan."""
    notes: tuple[str, ...] = ()
    """Steps to do by hand, and what the patch rests on, in a sentence each."""

    @property
    def patched(self) -> Any:
        """The object, or the values, with the plan."""
        draft = Draft(self.target)
        for each in self.operations:
            draft.apply(each)
        return draft.data


def keys_of(operation: Mapping[str, Any]) -> list[str]:
    """Return the keys and positions in the path of an operation (RFC 6901)."""
    return [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]


class Draft:
    """An object while it is changed, and the changes as operations of a JSON patch."""

    def __init__(self, data: Any) -> None:
        self.data = copy.deepcopy(data)
        self.operations: list[dict[str, Any]] = []

    def put(self, path: KeyPath, value: Any) -> None:
        """Set a value; mappings on the way are made where they are missing."""
        held = next((n for n in range(len(path)) if within(self.data, *path[: n + 1]) is None), len(path))
        if held == len(path):
            if within(self.data, *path) != value:
                self._change("replace", path, value)
            return
        # A JSON patch adds no parents, so that one operation adds all that is missing.
        for key in reversed(path[held + 1 :]):
            value = {key: value}
        self._change("add", path[: held + 1], value)

    def put_item(self, path: KeyPath, item: Any, same: Callable[[Any], bool] = lambda _: False) -> None:
        """Put an item into a list: in the place of the one that is the ``same``, or behind all."""
        items = within(self.data, *path) or []
        index = next((index for index, each in enumerate(items) if same(each)), None)
        if index is not None:
            self.put((*path, index), item)
        elif items:
            self._change("add", (*path, "-"), item)
        else:
            self.put(path, [item])

    def test(self, path: KeyPath) -> None:
        """Let the patch fail where a value is another one."""
        value = within(self.data, *path)
        if value is not None:
            self._change("test", path, value)

    def _change(self, operation: str, path: KeyPath, value: Any) -> None:
        pointer = "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in path)
        # A copy: the draft changes further, and its operations must not change with it.
        self.operations.append({"op": operation, "path": pointer, "value": copy.deepcopy(value)})
        self.apply(self.operations[-1])

    def apply(self, operation: Mapping[str, Any]) -> None:
        """Apply an operation whose place exists; what it tests is true of the object that it was made for."""
        *path, last = keys_of(operation)
        held = self.data
        for part in path:
            held = held[int(part) if isinstance(held, list) else part]
        value = copy.deepcopy(operation["value"])
        if isinstance(held, list) and last == "-":
            held.append(value)
        elif operation["op"] != "test":
            held[int(last) if isinstance(held, list) else last] = value


def plan_patch(
    plan: Plan,
    engine: Engine,
    text: str,
    component: ShellCommand,
    read_back: Callable[[str], Sequence[ShellCommand]],
    *,
    name: str | None = None,
    namespace: str | None = None,
    image: str | None = None,
) -> PlanPatch:
    """Return what puts a plan into a component of a deployment.

    :param text: the file of the deployment.
    :param component: the engine's server in it.
    :param read_back: returns the engine's servers in a text.
    :param name: of the ConfigMap. Default: the object's and the component's, with ``capture-plan`` behind them.
    :param namespace: of the ConfigMap. Default: the object's.
    :param image: of the init container. Default: the component's, where the file names it.
    :raises FlagError: the flags contradict the plan, the engine has no plugin, or the pod is not known.
    :raises InvalidValue: the plan has errors, or is too large for a ConfigMap.
    """
    if engine.launch is None:
        raise FlagError([Problem(message=f"{engine.name} has no plugin that runs a plan", remedy="export its flags")])
    number, *keys = component.at
    data: Any = (documents(text) or [])[int(number)][0].plain()
    # In a list of objects the patch is about one of them.
    depth = max((n for n in range(len(keys)) if "kind" in (within(data, *keys[:n]) or ())), default=0)
    target, path = within(data, *keys[:depth]), tuple(keys[depth:])
    pods = tuple(_pods(component.form, target, path))
    if not pods:
        raise FlagError([Problem(message="no pod is known around this container", remedy="name one of a pod template")])
    if component.form != "helm" and not within(target, "metadata", "name"):
        raise FlagError([Problem(message="the object has no metadata.name", remedy="a patch finds it by its name")])
    draft, notes = _begun(target, pods), list[str]()
    for pod, words in _servers(target, pods, component, read_back).items():
        launch = engine.launch(plan, words)
        notes += launch.notes
        given = _given(draft, pod, words, launch.arguments, read_back)
        if given is None:
            added = shlex.join(launch.arguments)
            notes.append(f"the command takes no further arguments; add to its text: {added}")
        draft = given or draft
    config = _config_map(plan, target, component, name, namespace)
    image = image or _image(within(target, *pods[0].container))
    ignored = _ignored(plan)
    held = within(target, *pods[0].init, "name") if pods[0].init[-1] == "initContainer" else None
    if held not in (None, CHECK):
        image = None
        notes.append(f"no init container runs check: the chart takes one, and that is {held}")
    elif image is None:
        notes.append("no init container runs check: the file names no image of the server; give --image")
    else:
        notes.append(f"an init container runs check in {image}, which needs capture-planner in it")
        notes += [f"that check ignores {', '.join(ignored)}: this plan has these warnings already"] if ignored else []
    if len(config["data"][FILE]) > MOST_APPLIED:
        notes.append("kubectl apply needs --server-side for a ConfigMap of this size")
    for pod in pods:
        _mount(draft, pod, config, image, ignored)
    if component.form == "helm":
        own = config["metadata"]["name"]
        draft.put_item(("extraObjects",), _untemplated(config), lambda each: within(each, "metadata", "name") == own)
    return PlanPatch(
        component=component, target=target, operations=tuple(draft.operations), config=config, notes=tuple(notes)
    )


def _pods(form: str, target: Any, path: KeyPath) -> Iterator[PodPlaces]:
    """Yield the pod of a component and, where it has workers, their pod: they need the plan, too."""
    if path[:2] == ("servingEngineSpec", "modelSpec"):
        # Its workers of Ray have the variables of a model, and not its mounts.
        if not within(target, *path, "raySpec", "enabled"):
            yield PodPlaces(
                container=path,
                volumes=(*path, "extraVolumes"),
                annotations=(*path, "podAnnotations"),
                init=(*path, "initContainer"),
                mounts="extraVolumeMounts",
                args=("vllmConfig", "extraArgs"),
            )
    elif path[-1:] == ("mainContainer",):
        yield _pod(path, path[:-1], (*path[:-2], "extraPodMetadata", "annotations"))
    elif form == "helm":
        yield _pod(path, path[:-2], (*path[:-2], "podAnnotations"))
    elif form == "kserve":
        for key in ("template", "worker"):
            yield from _pods_like(target, path, -3, key, lambda pod: (*pod[:-1], "annotations"))
    elif path[-3:-1] == ("spec", "containers"):
        keys = ("leaderTemplate", "workerTemplate")
        own = path[-4] if len(path) > 3 else ""
        for other in (own, *(each for each in keys if own in keys and each != own)):
            yield from _pods_like(target, path, -4, other, lambda pod: (*pod[:-1], "metadata", "annotations"))


def _pods_like(
    target: Any, path: KeyPath, at: int, key: str | int, annotations: Callable[[KeyPath], KeyPath]
) -> Iterator[PodPlaces]:
    """Yield the pod of a container, with a key in the place of its own: the one of the same name, or the first."""
    other: KeyPath = (*path[:at], key, *path[at + 1 :]) if key else path
    containers = within(target, *other[:-1]) or []
    names = [within(each, "name") for each in containers]
    name = within(target, *path, "name")
    index: str | int = path[-1] if other == path else names.index(name) if name in names else 0
    if other == path or containers:
        yield _pod((*other[:-1], index), other[:-2], annotations(other[:-2]))


def _pod(container: KeyPath, pod: KeyPath, annotations: KeyPath) -> PodPlaces:
    return PodPlaces(
        container=container, volumes=(*pod, "volumes"), annotations=annotations, init=(*pod, "initContainers")
    )


def _begun(target: Any, pods: Sequence[PodPlaces]) -> Draft:
    """Return a patch that fails where a container is not at its place."""
    draft = Draft(target)
    for pod in pods:
        # KServe's own template names it so, and it needs no other key here (config-llm-template.yaml).
        if within(target, *pod.container) is None:
            draft.put(pod.container[:-1], [{"name": "main"}])
        else:
            draft.test((*pod.container, "name"))
    return draft


def _servers(
    target: Any, pods: Sequence[PodPlaces], component: ShellCommand, read_back: Callable[[str], Sequence[ShellCommand]]
) -> dict[PodPlaces, tuple[str, ...]]:
    """Return the words of the server in each pod: of workers that start one of their own, too."""
    first, *others = pods
    found = {first: component.words}
    own = {each.at[1:]: each.words for each in read_back(json.dumps(target, indent=1))} if others else {}
    raw = {each.at: each.words for each in document_commands(node_of(target), "")} if others else {}
    for pod in others:
        # KServe's workers run its template with the same arguments, behind --headless.
        alike = component.form == "kserve" or raw.get(pod.container) == raw[first.container]
        words = component.words if alike else own.get(pod.container)
        found |= {} if words is None else {pod: words}
    return found


def _given(
    draft: Draft,
    pod: PodPlaces,
    words: Sequence[str],
    arguments: Sequence[str],
    read_back: Callable[[str], Sequence[ShellCommand]],
) -> Draft | None:
    """Return the draft with arguments behind those of a server; None where the server would not get them."""
    # A copy, because the arguments may have to be taken back.
    trial = copy.deepcopy(draft)
    for word in arguments:
        trial.put_item((*pod.container, *pod.args), word)
    # A shell may have the flags in its own text, and pass no arguments on.
    found = read_back(json.dumps(trial.data, indent=1)) if arguments else ()
    return trial if not arguments or any(each.words == (*words, *arguments) for each in found) else None


def _config_map(
    plan: Plan, target: Any, component: ShellCommand, name: str | None, namespace: str | None
) -> dict[str, Any]:
    """Return the ConfigMap; raises ``InvalidValue`` where it has no name, or not the room."""
    metadata = within(target, "metadata") or {}
    parts = dict.fromkeys(str(each) for each in (metadata.get("name"), component.component) if each)
    name = name or re.sub(r"[^a-z0-9.-]+", "-", "-".join((*parts, VOLUME)).lower()).strip("-.")
    if not _NAME.fullmatch(name):
        message = f"{name!r} is no name of a ConfigMap: at most 253 lower-case letters, digits, dashes and dots"
        raise InvalidValue([Problem(message=message, remedy="give another with --name")])
    text = codec.dumps(plan)
    size = len(text.encode())
    if size > MOST_BYTES:
        remedy = f"put the plan into the image or on a volume, and set {PLAN} to its path"
        raise InvalidValue([Problem(message=f"the plan has {size} bytes, and a ConfigMap holds 1 MiB", remedy=remedy)])
    namespace = namespace or metadata.get("namespace")
    labels = {ANNOTATION: digest(plan)}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, **({"namespace": namespace} if namespace else {}), "annotations": labels},
        "data": {FILE: text},
    }


def _untemplated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ConfigMap as a chart's template that expands to it."""
    text = config["data"][FILE].replace("{{", '{{ "{{" }}')
    return {**config, "data": {FILE: text}}


def _image(container: Any) -> str | None:
    """Return the image that a container, or a model of vLLM's production stack, names."""
    image, tag = within(container, "image"), within(container, "tag")
    return str(image) if image else f"{container.get('repository', 'vllm/vllm-openai')}:{tag}" if tag else None


def _ignored(plan: Plan) -> tuple[str, ...]:
    """Return the warnings about a plan, by code; raises ``InvalidValue`` where it has errors."""
    findings = lint(plan)
    errors = [each for each in findings if each.severity is Severity.ERROR]
    if errors:
        raise InvalidValue([Problem(message=str(each), remedy="check would stop every pod") for each in errors])
    return tuple(dict.fromkeys(each.rule.code for each in findings if each.severity is Severity.WARNING))


def _mount(draft: Draft, pod: PodPlaces, config: Mapping[str, Any], image: str | None, ignored: Sequence[str]) -> None:
    """Put the plan into a pod, with the init container that checks it in an image, if there is one."""

    def named(name: str) -> Callable[[Any], bool]:
        return lambda each: within(each, "name") == name

    path, mount = f"{FOLDER}/{FILE}", {"name": VOLUME, "mountPath": FOLDER, "readOnly": True}
    container = pod.container
    draft.put_item((*container, "env"), {"name": PLAN, "value": path}, named(PLAN))
    draft.put_item((*container, pod.mounts), mount, named(VOLUME))
    volume = {"name": VOLUME, "configMap": {"name": config["metadata"]["name"]}}
    draft.put_item(pod.volumes, volume, named(VOLUME))
    draft.put((*pod.annotations, ANNOTATION), config["metadata"]["annotations"][ANNOTATION])
    if image is not None:
        command = ["capture-planner", "check", path, *(["--ignore", ",".join(ignored)] if ignored else [])]
        check = {"name": CHECK, "image": image, "command": command, pod.mounts: [mount]}
        if pod.init[-1] == "initContainer":
            draft.put(pod.init, check)
        else:
            draft.put_item(pod.init, check, named(CHECK))


def kustomization(patch: PlanPatch, resource: str | None) -> str:
    """Return a patch as the file of kustomize, with its ConfigMap.

    :param resource: the deployment's file, below the folder of the kustomization. None: it is a component, which others
        name next to their resources.
    """
    api, kind = ("v1beta1", "Kustomization") if resource else ("v1alpha1", "Component")
    group, _, version = str(patch.target.get("apiVersion", "")).rpartition("/")
    metadata = patch.config["metadata"]
    target = {
        "group": group,
        "version": version,
        "kind": patch.target["kind"],
        "name": within(patch.target, "metadata", "name"),
    }
    data = {
        "apiVersion": f"kustomize.config.k8s.io/{api}",
        "kind": kind,
        **({"resources": [resource]} if resource else {}),
        "patches": [
            {
                # The core API has no group.
                "target": {key: value for key, value in target.items() if value},
                "patch": "".join(f"- {json.dumps(each)}\n" for each in patch.operations),
            }
        ],
        "configMapGenerator": [
            {
                **{key: metadata[key] for key in ("name", "namespace") if key in metadata},
                # The annotation of the pods changes with the plan, so that the name need not.
                "options": {"disableNameSuffixHash": True, "annotations": metadata["annotations"]},
                "literals": [f"{FILE}={patch.config['data'][FILE]}"],
            }
        ],
    }
    return codec.dumps_plain(data)


def values(patch: PlanPatch) -> str:
    """Return the values that a patch changes, as a file of Helm behind the others: each list whole."""
    changed: dict[str, Any] = {}
    patched = patch.patched
    for each in patch.operations:
        keys = keys_of(each)
        place, data = changed, patched
        for key in keys:
            data = data[key]
            if isinstance(data, list) or key == keys[-1]:
                place[key] = data
                break
            place = place.setdefault(key, {})
    return codec.dumps_plain(changed)
