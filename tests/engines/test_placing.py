"""Plans in deployments: what is put into a manifest or a chart's values is there, and all else stays as it was."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess

import attrs
import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.analysis.lint import lint
from capture_planner.analysis.lint.core import Severity
from capture_planner.engines import emulate, find_engine, placing, servers
from capture_planner.engines.launch import PLAN, Launch
from capture_planner.engines.placing import ANNOTATION, CHECK, FILE, kustomization, plan_patch, values
from capture_planner.errors import FlagError, InvalidValue
from capture_planner.records._base import digest
from capture_planner.records.plan import Plan
from capture_planner.testing.strategies.plans import plans
from support.commands import PLAN as LOCKED

MODEL = "Qwen/Qwen3-8B"
DRAFTER = '{"method": "eagle3", "model": "my/drafter", "num_speculative_tokens": 3}'
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
FLAG = ("--max-num-seqs", "24")


def launch(plan, command):
    """Return one flag, if the command lacks it."""
    return Launch(arguments=() if FLAG[0] in command else FLAG)


VLLM = attrs.evolve(find_engine("vllm"), launch=launch)
"""An engine that runs any plan."""
SOUND = plans(max_reqs=16, max_tokens=64).filter(
    lambda plan: all(each.severity is not Severity.ERROR for each in lint(plan))
)


def made(name, version, kind, spec, namespace):
    """Return an object of Kubernetes."""
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def template(pod):
    """Return a pod template."""
    return {"template": {"metadata": {"labels": {"app": "a"}}, "spec": pod}}


FORMS = {
    "deployment": lambda name, space, pod: made(name, "apps/v1", "Deployment", template(pod), space),
    "group": lambda name, space, pod: made(
        name,
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        {"leaderWorkerTemplate": {"leaderTemplate": {"spec": pod}, "workerTemplate": {"spec": copy.deepcopy(pod)}}},
        space,
    ),
    "kserve": lambda name, space, pod: made(
        name,
        "serving.kserve.io/v1alpha1",
        "LLMInferenceService",
        {"model": {"uri": f"hf://{MODEL}"}, "template": pod, "worker": copy.deepcopy(pod)},
        space,
    ),
    "kserve prefill": lambda name, space, pod: made(
        name,
        "serving.kserve.io/v1alpha2",
        "LLMInferenceService",
        {"model": {"uri": f"hf://{MODEL}"}, "prefill": {"template": pod}},
        space,
    ),
    "dynamo": lambda name, space, pod: made(
        name,
        "nvidia.com/v1alpha1",
        "DynamoGraphDeployment",
        {
            "services": {
                "Decode": {"extraPodSpec": {"mainContainer": pod["containers"][0]} | without(pod, "containers")}
            }
        },
        space,
    ),
    "dynamo beta": lambda name, space, pod: made(
        name,
        "nvidia.com/v1beta1",
        "DynamoGraphDeployment",
        {"components": [{"name": "decode", "podTemplate": {"spec": pod}}]},
        space,
    ),
    "production stack": lambda name, space, pod: {
        "servingEngineSpec": {"modelSpec": [stack(name, pod), {"name": "other", "tag": "v1"}]}
    },
    "llm-d": lambda name, space, pod: {
        "modelArtifacts": {"uri": f"hf://{MODEL}", "name": "m"},
        "decode": {"create": True, "podAnnotations": {"a": "b"}, **pod},
    },
}
CHARTS = ("production stack", "llm-d")
FORMATS = {"deployment": "kubernetes", "group": "kubernetes", "kserve": "kserve", "kserve prefill": "kserve"}
FORMATS |= {"dynamo": "dynamo", "dynamo beta": "dynamo", "production stack": "helm", "llm-d": "helm"}


def without(data, *keys):
    """Return a mapping without keys."""
    return {key: value for key, value in data.items() if key not in keys}


def stack(name, pod):
    """Return a model of vLLM's production stack."""
    container = pod["containers"][0]
    return {
        "name": name,
        "modelURL": MODEL,
        "repository": "x/vllm",
        "tag": "v0.33.0",
        "vllmConfig": {"extraArgs": container["args"][3:]},
        **({"env": container["env"]} if "env" in container else {}),
        **({"extraVolumeMounts": container["volumeMounts"]} if "volumeMounts" in container else {}),
        **({"extraVolumes": pod["volumes"]} if "volumes" in pod else {}),
    }


@st.composite
def pods(draw):
    """Return a pod whose first container serves, with and without what a plan adds to."""
    container = {"name": "main", "image": "x/vllm:v0.33.0", "args": ["vllm", "serve", MODEL, "--dtype", "auto"]}
    maybe = {
        "env": draw(st.none() | st.lists(st.builds(lambda n: {"name": n.upper(), "value": "yes"}, NAMES), max_size=2)),
        "volumeMounts": draw(st.none() | st.just([{"name": "data", "mountPath": "/data"}])),
    }
    container |= {key: value for key, value in maybe.items() if value is not None}
    pod = {"containers": [container, {"name": "side", "image": "y"}]}
    more = {
        "volumes": draw(st.none() | st.just([{"name": "data", "emptyDir": {}}])),
        "initContainers": draw(st.none() | st.just([{"name": "fetch", "image": "z", "command": ["fetch"]}])),
    }
    return pod | {key: value for key, value in more.items() if value is not None}


@st.composite
def deployed(draw, forms=tuple(FORMS)):
    """Return a form, and the text of a deployment in it."""
    form = draw(st.sampled_from(forms))
    data = FORMS[form](draw(NAMES), draw(st.none() | NAMES), draw(pods()))
    return form, data


def read_back(text):
    """Return the servers in a text."""
    return servers("vllm", [text])


def patched(plan, data, engine=VLLM, **options):
    """Return the patch of the last server of a deployment: KServe has one of decodes without any key."""
    text = json.dumps(data, indent=1)
    return plan_patch(plan, engine, text, read_back(text)[-1], read_back, **options)


def keeps(before, after):
    """Say whether all of a value is still there: keys, and items in their order at the front of lists."""
    if isinstance(before, dict):
        return isinstance(after, dict) and all(key in after and keeps(each, after[key]) for key, each in before.items())
    if isinstance(before, list):
        return isinstance(after, list) and len(after) >= len(before) and all(map(keeps, before, after))
    return before == after


def found(data, key):
    """Yield the values of a key at any depth."""
    for name, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        if name == key:
            yield value
        yield from found(value, key)


@given(deployed(), SOUND)
def test_a_patched_deployment_has_the_plan_and_all_that_it_had(form, plan):
    """Our own reader finds the plan's variable and the flags that it needs, behind the others."""
    form, data = form
    patch = patched(plan, data)
    assert patch.component.form == FORMATS[form]
    assert keeps(data, patch.patched)
    before, after = (read_back(json.dumps(each, indent=1))[-1] for each in (data, patch.patched))
    assert after.words == (*before.words, *FLAG)
    assert after.variables == {**before.variables, PLAN: f"{placing.FOLDER}/{FILE}"}
    assert codec.loads(patch.config["data"][FILE], Plan) == plan
    assert set(found(patch.patched, ANNOTATION)) == {digest(plan)}
    names = [each["name"] for each in found(patch.patched, "configMap")]
    assert set(names) == {patch.config["metadata"]["name"]}
    # Both pods of a group, or the only one.
    assert len(names) == (2 if form in ("group", "kserve") else 1)
    assert patch.config["metadata"].get("namespace") == data.get("metadata", {}).get("namespace")
    checks = [each for each in _mappings(patch.patched) if each.get("name") == CHECK]
    assert {each["image"] for each in checks} == {"x/vllm:v0.33.0"}
    assert all(each["command"][:3] == ["capture-planner", "check", f"{placing.FOLDER}/{FILE}"] for each in checks)


def _mappings(data):
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        if isinstance(value, dict):
            yield value
        yield from _mappings(value)


@given(deployed(), SOUND, SOUND)
def test_another_plan_changes_the_digest_alone(form, plan, other):
    """The same plan once more changes nothing; another one rolls the pods, by their annotation."""
    _, data = form
    once = patched(plan, data).patched
    again = patched(plan, once)
    assert again.patched == once
    assert {each["op"] for each in again.operations} <= {"test"}
    assume(plan != other)
    changes = [each for each in patched(other, once).operations if each["op"] != "test"]
    places = {each["path"].rpartition("/")[2] for each in changes}
    assert "capture-planner~1plan-digest" in places
    # With other warnings check ignores others; a chart has the plan itself.
    assert places <= {"capture-planner~1plan-digest", "initContainer"} | {str(n) for n in range(9)}


def applied(data, operations):
    """Apply a JSON patch as RFC 6902 has it, written again."""
    data = copy.deepcopy(data)
    for each in operations:
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in each["path"][1:].split("/")]
        held = data
        for part in path:
            held = held[int(part)] if isinstance(held, list) else held[part]
        key = last if isinstance(held, dict) else len(held) if last == "-" else int(last)
        if each["op"] == "test":
            assert held[key] == each["value"]
        elif isinstance(held, list) and each["op"] == "add":
            held.insert(key, each["value"])
        else:
            held[key] = each["value"]
    return data


@given(deployed(tuple(each for each in FORMS if each not in CHARTS)), SOUND)
def test_kustomize_has_a_patch_of_that_object(form, plan):
    """The file selects the object, and its operations make of it what was promised; the literal is the plan."""
    _, data = form
    patch = patched(plan, data)
    file = yaml.safe_load(kustomization(patch, "deploy.yaml"))
    (one,) = file["patches"]
    group, _, version = data["apiVersion"].rpartition("/")
    assert one["target"] == {"group": group, "version": version, "kind": data["kind"], "name": data["metadata"]["name"]}
    assert applied(data, yaml.safe_load(one["patch"])) == patch.patched
    (config,) = file["configMapGenerator"]
    key, _, text = config["literals"][0].partition("=")
    assert (key, codec.loads(text, Plan)) == (FILE, plan)
    assert config["options"] == {"disableNameSuffixHash": True, "annotations": {ANNOTATION: digest(plan)}}
    assert (file["kind"], file["resources"]) == ("Kustomization", ["deploy.yaml"])
    component = yaml.safe_load(kustomization(patch, None))
    assert (component["kind"], component.get("resources")) == ("Component", None)


def merged(below, over):
    """Return values as Helm merges files of them: mappings, and nothing else."""
    if not (isinstance(below, dict) and isinstance(over, dict)):
        return over
    return below | {key: merged(below.get(key), value) for key, value in over.items()}


@given(deployed(CHARTS), SOUND)
def test_helm_has_the_values_that_change(form, plan):
    """Behind the user's own file of values they give what was promised."""
    _, data = form
    patch = patched(plan, data)
    over = yaml.safe_load(values(patch))
    assert merged(data, over) == patch.patched
    (config,) = over["extraObjects"]
    assert codec.loads(config["data"][FILE], Plan) == plan


def test_a_charts_template_expands_to_the_plan():
    """What looks like a template in a plan is written so that it expands to itself."""
    config = {"data": {FILE: "a: '{{ .Values.b }}'"}}
    assert placing._untemplated(config)["data"][FILE] == "a: '{{ \"{{\" }} .Values.b }}'"


POD = {"volumes": [{"name": str, "configMap": {"name": str}}]}
MOUNT = {"name": str, "mountPath": str, "readOnly": bool}
INIT = {"name": str, "image": str, "command": [str]}
CONTAINER = {"args": [str], "env": [{"name": str, "value": str}], "volumeMounts": [MOUNT]}
SPEC = POD | {"containers": [CONTAINER], "initContainers": [INIT | {"volumeMounts": [MOUNT]}]}
WITH_METADATA = {"metadata": {"annotations": {ANNOTATION: str}}, "spec": SPEC}
WORKLOAD = {"annotations": {ANNOTATION: str}, "template": SPEC, "worker": SPEC}
SCHEMAS = {
    # apps/v1 DeploymentSpec.template, core/v1 PodTemplateSpec.
    "deployment": {"spec": {"template": WITH_METADATA}},
    # kubernetes-sigs/lws api/leaderworkerset/v1/leaderworkerset_types.go.
    "group": {"spec": {"leaderWorkerTemplate": {"leaderTemplate": WITH_METADATA, "workerTemplate": WITH_METADATA}}},
    # kserve v0.20, pkg/apis/serving/v1alpha1/llm_inference_service_types.go: WorkloadSpec, inline and under prefill.
    "kserve": {"spec": WORKLOAD},
    "kserve prefill": {"spec": {"prefill": WORKLOAD}},
    # ai-dynamo/dynamo deploy/operator/api/v1alpha1/common.go: ExtraPodSpec, ExtraPodMetadata.
    "dynamo": {
        "spec": {
            "services": {
                "Decode": {
                    "extraPodMetadata": {"annotations": {ANNOTATION: str}},
                    "extraPodSpec": without(SPEC, "containers") | {"mainContainer": CONTAINER},
                }
            }
        }
    },
    # The same in v1beta1: components[].podTemplate.
    "dynamo beta": {"spec": {"components": [{"podTemplate": WITH_METADATA}]}},
    # vllm-project/production-stack helm/values.schema.json of vllm-stack 0.1.12, and extraObjects.
    "production stack": {
        "servingEngineSpec": {
            "modelSpec": [
                {
                    "vllmConfig": {"extraArgs": [str]},
                    "env": [{"name": str, "value": str}],
                    "extraVolumeMounts": [MOUNT],
                    "extraVolumes": POD["volumes"],
                    "podAnnotations": {ANNOTATION: str},
                    "initContainer": INIT | {"extraVolumeMounts": [MOUNT]},
                }
            ]
        }
    },
    # llm-d-incubation/llm-d-modelservice v0.4.0, values.yaml and templates/decode-deployment.yaml.
    "llm-d": {"decode": SPEC | {"podAnnotations": {ANNOTATION: str}}},
}
OBJECT = {"apiVersion": str, "kind": str, "data": {FILE: str}}
OBJECT |= {"metadata": {"name": str, "namespace": str, "annotations": {ANNOTATION: str}}}
for each_ in CHARTS:
    SCHEMAS[each_]["extraObjects"] = [OBJECT]


def added(before, after, path=()):
    """Yield each leaf that is new, with its path; positions in lists are ``None``."""
    if isinstance(after, dict):
        for key, value in after.items():
            yield from added(before.get(key) if isinstance(before, dict) else None, value, (*path, key))
    elif isinstance(after, list):
        old = before if isinstance(before, list) else []
        for index, value in enumerate(after):
            yield from added(old[index] if index < len(old) else None, value, (*path, None))
    elif before != after:
        yield path, after


@given(deployed(), SOUND)
def test_what_is_added_is_a_field_of_the_schema(form, plan):
    """Excerpts of the types that the objects and charts have, written by hand."""
    form, data = form
    for path, value in added(data, patched(plan, data).patched):
        place = SCHEMAS[form]
        for key in path:
            place = place[0] if key is None else place[key]
        assert isinstance(value, place)


def test_workers_with_a_server_of_their_own_get_its_flags():
    """Leaders and workers whose commands differ each get what theirs lacks; a shell's text is left to its author."""
    plan = codec.load_plan(LOCKED)
    serve = ["vllm", "serve", MODEL, "--speculative-config", DRAFTER]
    pods_ = [{"containers": [{"name": "a", "image": "x", "args": [*serve, *more]}]} for more in ([], ["--headless"])]
    data = FORMS["group"]("a", None, pods_[0])
    data["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"] = pods_[1]
    patch = patched(plan, data, find_engine("vllm"))
    whole = list(found(patch.patched, "args"))
    assert [args[-1] for args in whole] == ["-cc.cudagraph_mode=FULL_AND_PIECEWISE"] * 2
    assert emulate("vllm", whole[0][2:], plan.environment).limits == plan.limits
    pods_[0]["containers"][0] = {"name": "a", "image": "x", "command": ["sh", "-c", f"vllm serve {MODEL}"]}
    shell = patched(plan, FORMS["deployment"]("a", None, pods_[0]), VLLM)
    assert "add to its text: --max-num-seqs 24" in shell.notes[0]
    assert list(found(shell.patched, "args")) == []


def test_what_cannot_be_placed_is_refused(monkeypatch):
    """With the reason, and what to do instead."""
    plan = codec.load_plan(LOCKED)
    pod = {"containers": [{"name": "a", "image": "x", "args": ["vllm", "serve", MODEL]}]}
    with pytest.raises(FlagError, match="no plugin that runs a plan; export its flags"):
        patched(plan, FORMS["deployment"]("a", None, pod), attrs.evolve(VLLM, launch=None))
    with pytest.raises(FlagError, match="no pod is known around this container"):
        patched(plan, made("a", "x/v1", "Thing", {"box": pod["containers"][0]}, None))
    unnamed = FORMS["deployment"]("a", None, pod)
    unnamed["metadata"] = {"generateName": "a-"}
    with pytest.raises(FlagError, match=r"has no metadata\.name; a patch finds it by its name"):
        patched(plan, unnamed)
    model = {"name": "a", "modelURL": MODEL, "tag": "v1", "raySpec": {"enabled": True}}
    with pytest.raises(FlagError, match="no pod is known"):
        patched(plan, {"servingEngineSpec": {"modelSpec": [model]}})
    with pytest.raises(InvalidValue, match=r"is no name of a ConfigMap.*--name"):
        patched(plan, FORMS["deployment"]("a", None, pod), name="A_B")
    taken = {"name": "a", "modelURL": MODEL, "tag": "v1", "initContainer": {"name": "own", "image": "y"}}
    patch = patched(plan, {"servingEngineSpec": {"modelSpec": [taken]}})
    assert "the chart takes one, and that is own" in patch.notes[0]
    assert list(found(patch.patched, "initContainer")) == [taken["initContainer"]]
    del pod["containers"][0]["image"]
    assert "give --image" in patched(plan, FORMS["deployment"]("a", None, pod)).notes[0]
    monkeypatch.setattr(placing, "MOST_APPLIED", 10)
    assert "--server-side" in patched(plan, FORMS["deployment"]("a", None, pod)).notes[-1]
    monkeypatch.setattr(placing, "MOST_BYTES", 10)
    with pytest.raises(InvalidValue, match="a ConfigMap holds 1 MiB; put the plan into the image or on a volume"):
        patched(plan, FORMS["deployment"]("a", None, pod))


def test_an_object_of_a_list_is_found_by_its_own_name():
    """``kubectl get -o yaml`` writes a list: the patch is about one object of it."""
    pod = {"containers": [{"name": "a", "image": "x", "args": ["vllm", "serve", MODEL]}]}
    listed = {"kind": "List", "items": [FORMS["deployment"]("b", "n", pod)]}
    patch = patched(codec.load_plan(LOCKED), listed)
    assert (patch.component.component, patch.target) == ("b", listed["items"][0])
    assert (patch.config["metadata"]["name"], patch.config["metadata"]["namespace"]) == ("b-capture-plan", "n")


def test_kserves_own_template_needs_no_container():
    """A service without a container gets one, under the name that KServe's templates have."""
    data = made("a", "serving.kserve.io/v1alpha1", "LLMInferenceService", {"model": {"uri": f"hf://{MODEL}"}}, None)
    data["spec"]["template"] = {}
    patch = patched(codec.load_plan(LOCKED), data)
    (container,) = patch.patched["spec"]["template"]["containers"]
    assert (container["name"], container["args"]) == ("main", list(FLAG))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_what_the_patch_promises(run, tmp_path):
    """Kustomize itself keeps the containers and arguments of a kind that it does not know."""
    pod = {
        "containers": [{"name": "a", "image": "x", "args": ["vllm", "serve", MODEL]}, {"name": "side", "image": "y"}]
    }
    pod["containers"][0]["args"] += ["--speculative-config", DRAFTER]
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / "deploy.yaml").write_text(json.dumps(FORMS["group"]("chat", None, pod), indent=1))
    words = ("--to", "vllm", "--format", "kubernetes", "--into", str(folder / "deploy.yaml"))
    ran = run("export", LOCKED, *words, "-o", str(folder / "kustomization.yaml"))
    assert ran.code == 0, ran.err
    built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True)
    config, group = yaml.safe_load_all(built.stdout)
    assert codec.loads(config["data"][FILE], Plan) == codec.load_plan(LOCKED)
    assert [len(each) for each in found(group, "containers")] == [2, 2]
    (tmp_path / "all.yaml").write_text(built.stdout)
    said = run("engine", "vllm", str(tmp_path / "all.yaml"), "-e", "h100").out
    assert f"{PLAN} is set" in said


def test_the_command_says_what_is_wrong_and_where(run, tmp_path):
    """Messages name the file and the line, what was expected, and what to give."""
    pod = {"containers": [{"name": "a", "image": "x", "args": ["vllm", "serve", MODEL, "--max-num-seqs", "128"]}]}
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump(FORMS["deployment"]("chat", "ns", pod), sort_keys=False))
    to = ("export", LOCKED, "--to", "vllm", "--format")
    assert "--into FILE" in run(*to, "kubernetes").err
    assert "no such file" in run(*to, "kubernetes", "--into", "nowhere.yaml").err
    assert (
        "deploy.yaml:15: this is no deployment for --format helm; give --format kubernetes"
        in run(*to, "helm", "--into", str(file)).err
    )
    wrong = run(*to, "kubernetes", "--into", str(file))
    assert (wrong.code, "deploy.yaml:15: --max-num-seqs: given 128, the plan has 256" in wrong.err) == (1, True)
    file.write_text(
        file.read_text().replace("'128'", "'256'") + f"        - --speculative-config\n        - '{DRAFTER}'\n"
    )
    assert "--format kubernetes" in run(*to, "text", "--into", str(file)).err
    assert "leave them out" in run(*to, "kubernetes", "--into", str(file), "--strict").err
    good = run(*to, "kubernetes", "--into", str(file), "--image", "z:1", "--name", "p", "--namespace", "q")
    data = yaml.safe_load(good.out)
    (config,) = data["configMapGenerator"]
    assert (config["name"], config["namespace"]) == ("p", "q")
    assert '"image": "z:1"' in data["patches"][0]["patch"]
    assert "runs check in z:1" in good.err
    file.write_text(f"services:\n  a:\n    command: vllm serve {MODEL}\n")
    assert "known are objects of Kubernetes" in run(*to, "kubernetes", "--into", str(file)).err
