"""The forms in which servers are deployed: whatever the file, the server's own words are found in it."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.codec.shipped import find_environment
from capture_planner.engines import components, emulate, read
from capture_planner.engines.manifests import container_commands
from capture_planner.engines.shell import read_shell
from capture_planner.errors import FlagError

H100 = find_environment("h100")
MODEL = "Qwen/Qwen3-8B"
FLAGS = st.lists(
    st.sampled_from(
        [("--max-num-seqs", "64"), ("--enforce-eager",), ("-cc", '{"cudagraph_mode": "FULL"}'), ("--port", "80")]
    ),
    unique=True,
    max_size=4,
).map(lambda chosen: [word for words in chosen for word in words])


def listed(words, indent):
    """Write words as a YAML list."""
    return "".join(f"\n{' ' * indent}- {json.dumps(word)}" for word in words) or " []"


def container(flags, indent):
    """Write a container of Kubernetes."""
    words = listed(["serve", MODEL, *flags], indent + 2)
    return f"- name: main\n{' ' * indent}  image: vllm/vllm-openai:v0.33.0\n{' ' * indent}  command: [vllm]\n" + (
        f"{' ' * indent}  args:{words}\n"
    )


def quoted(words):
    """Write words as a shell takes them, inside a text of YAML."""
    return shlex.join(words)


FORMS = {
    "compose": lambda f: f"services:\n  a:\n    image: x/y\n    command:{listed(['vllm', 'serve', MODEL, *f], 6)}\n",
    "compose with bash": lambda f: (
        f"services:\n  a:\n    image: x/y\n    entrypoint: [bash, -c]\n    command:\n"
        f"      - |\n        export B=1\n        exec vllm serve {MODEL} {quoted(f)}\n"
    ),
    "passed arguments": lambda f: (
        "containers:\n- name: a\n  command: [bash, -c, 'exec vllm serve \"$@\"', start]\n"
        f"  args:{listed([MODEL, *f], 4)}\n"
    ),
    "evaluated": lambda f: (
        f'containers:\n- name: a\n  command: [sh, -c]\n  args:\n  - |\n    eval "exec vllm serve {MODEL} \\\n'
        '      ${NONE:-} \\\n      $@"\n  - start\n' + "".join(f"  - {json.dumps(word)}\n" for word in f)
    ),
    "deployment": lambda f: (
        "kind: Deployment\nmetadata: {name: a}\nspec:\n  template:\n    spec:\n      containers:\n"
        f"      {container(f, 6)}"
    ),
    "dynamo, first": lambda f: (
        "kind: DynamoGraphDeployment\nspec:\n  services:\n    Frontend:\n      extraPodSpec:\n        mainContainer:\n"
        "          command: [python3, -m, dynamo.frontend]\n    decode:\n      extraPodSpec:\n        mainContainer:\n"
        f"          command: [python3, -m, dynamo.vllm]\n          args:{listed(['--is-decode-worker', MODEL], 10)}"
        f"{listed([*f, '--dyn-tool-call-parser', 'x', '--migration-limit=3'], 10)}\n"
    ),
    "llm-d": lambda f: (
        f"modelArtifacts:\n  uri: hf://{MODEL}\ndecode:\n  containers:\n  - name: vllm\n    modelCommand: vllmServe\n"
        f"    args:{listed(f, 6)}\nprefill:\n  create: false\n"
    ),
    "kserve": lambda f: (
        f"kind: LLMInferenceService\nspec:\n  model:\n    uri: hf://{MODEL}\n  template:\n    containers:\n"
        f"    - name: main\n      env:\n      - name: VLLM_ADDITIONAL_ARGS\n        value: {json.dumps(quoted(f))}\n"
    ),
    "production stack": lambda f: (
        f"servingEngineSpec:\n  modelSpec:\n  - name: a\n    modelURL: {MODEL}\n    vllmConfig:\n"
        f"      extraArgs:{listed(f, 8)}\n"
    ),
    "patch": lambda f: (
        "- op: replace\n  path: /spec/template/spec/containers/0/args\n"
        f"  value:{listed(['vllm', 'serve', MODEL, *f], 4)}\n"
    ),
    "recipe": lambda f: (
        f"model:\n  model_id: {MODEL}\n  base_args:{listed(f, 4)}\nopt_in_features: [b]\nfeatures:\n"
        "  b:\n    args: [--enable-lora]\nvariants:\n  default: {precision: bf16}\n"
    ),
    "dockerfile": lambda f: (
        'FROM vllm/vllm-openai:v0.33.0\nENV A=1 \\\n    B=2\nENTRYPOINT ["vllm", "serve"]\n'
        f"CMD {json.dumps([MODEL, *f])}\n"
    ),
    "dockerfile of flags": lambda f: f"FROM vllm/vllm-openai:v0.33.0\nCMD {json.dumps(['--model', MODEL, *f])}\n",
    "dockerfile of a shell": lambda f: f"FROM x/y\nCMD vllm serve {MODEL} \\\n  {quoted(f)}\n",
}


@pytest.mark.parametrize("form", FORMS)
@given(FLAGS)
def test_every_form_has_the_words_of_the_command_line(form, flags):
    """What is emulated of a file is what the command line by itself is emulated as."""
    words = read("vllm", [FORMS[form](flags)]).words
    assert [word for word in words if word not in ("--model", "--is-decode-worker")] == [MODEL, *flags]


@given(FLAGS)
def test_slurm_recipes_have_flags_by_name(flags):
    """A role's flags are keys; switches are true."""
    pairs = {name: value for name, value in pairwise([*flags, ""]) if name.startswith("--")}
    keys = {name[2:]: True if value.startswith("--") or not value else value for name, value in pairs.items()}
    recipe = {"model": {"path": MODEL}, "backend": {"vllm_config": {"decode": {"dtype": "auto", **keys}}}}
    words = read("vllm", [json.dumps(recipe)]).words
    expected = [word for name, value in keys.items() for word in (f"--{name}", *([] if value is True else [value]))]
    assert words == (MODEL, "--dtype", "auto", *expected)


COUNT = 3
VALUES = st.integers(1, 99)
OVERRIDES = st.dictionaries(
    st.sampled_from(["max-running-requests", "chunked-prefill-size", "tp-size"]),
    VALUES | st.none() | VALUES.map(lambda value: [value]) | st.lists(VALUES, min_size=COUNT, max_size=COUNT),
)


def recipe_words(data):
    """Return the flags of each worker of a recipe, by name."""
    found = container_commands(json.dumps(data, indent=1)).commands
    own = {each.component: each.words[each.words.index(MODEL) + 1 :] for each in found}
    return {name: dict(zip(words[::2], words[1::2], strict=True)) for name, words in own.items()}


@given(OVERRIDES, OVERRIDES)
def test_overrides_of_slurm_recipes_are_zipped_and_merged(over, more):
    """Each variant is its base with the values of its place: a list has one for each, or one for all; null removes."""
    base = {"max-running-requests": 100, "tp-size": 4}
    single = {key: value for key, value in more.items() if not isinstance(value, list)}
    data = {
        "base": {"model": {"path": MODEL}, "backend": {"sglang_config": {"decode": base}}},
        "zip_override_z": {"resources": {"nodes": list(range(COUNT))}, "backend": {"sglang_config": {"decode": over}}},
        "override_one": {"backend": {"sglang_config": {"decode": single}}},
    }

    def expected(changes):
        return {f"--{key}": str(value) for key, value in (base | changes).items() if value is not None}

    found = recipe_words(data)
    assert found["base-decode"] == expected({})
    assert found["one-decode"] == expected(single)
    for index in range(COUNT):
        changes = {key: value[index % len(value)] if isinstance(value, list) else value for key, value in over.items()}
        assert found[f"z_{index}-decode"] == expected(changes)
    data["zip_override_z"]["resources"]["nodes"] = [1, 2]
    data["zip_override_z"]["resources"]["workers"] = [1, 2, 3]
    with pytest.raises(FlagError, match=r"zip_override_z: .*2 and 3 values; give each list"):
        recipe_words(data)


def test_sweeps_of_slurm_recipes_are_expanded(tmp_path):
    """Each combination that changes a worker is one; too many, and those of TensorRT-LLM, are refused with a way on."""
    data = {
        "sweep": {"size": [8, 16], "load": [1, 2]},
        "model": {"path": MODEL},
        "backend": {"sglang_config": {"decode": {"max-running-requests": "{size}", "tp-size": 4}}},
        "benchmark": {"concurrencies": ["{load}"]},
    }
    found = recipe_words(data)
    assert {name: each["--max-running-requests"] for name, each in found.items()} == {
        "size8-decode": "8",
        "size16-decode": "16",
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(data, indent=1))
    assert emulate("sglang", [f"{file}#size16-decode"], H100).limits.max_num_reqs == 16
    data["sweep"]["size"] = list(range(1, 100))
    with pytest.raises(FlagError, match="srtctl resolve-override"):
        recipe_words(data)
    data = {"base": {"backend": {"trtllm_config": {"decode": {"max_batch_size": 8}}}}, "override_a": {}}
    with pytest.raises(FlagError, match=r"TensorRT-LLM.*srtctl resolve-override"):
        recipe_words(data)


COMPONENTS = """kind: LLMInferenceService
spec:
  model: {uri: "hf://Qwen/Qwen3-8B"}
  parallelism: {tensor: 2}
  template:
    containers:
    - args: [--max-num-seqs, "600"]
  prefill:
    template:
      containers:
      - args: [--max-num-seqs, "8"]
"""


def test_each_component_has_an_answer_and_a_line(tmp_path, run):
    """A file of several is answered for each, and annotated where it stands; one is chosen by its name."""
    file = tmp_path / "service.yaml"
    file.write_text(COMPONENTS)
    found = {each.name: each for each in components("vllm", [str(file)])}
    assert {name: each.line for name, each in found.items()} == {"decode": 6, "prefill": 10}
    limits = {name: emulate("vllm", each.words, H100).limits.max_num_reqs for name, each in found.items()}
    assert limits == {"decode": 600, "prefill": 8}
    with pytest.raises(FlagError, match=r"name one of them: .*#decode or .*#prefill"):
        emulate("vllm", [str(file)], H100)
    with pytest.raises(FlagError, match="give one of them"):
        emulate("vllm", [COMPONENTS], H100)
    with pytest.raises(FlagError, match="name one of decode, prefill"):
        emulate("vllm", [f"{file}#router"], H100)
    text = run("engine", "vllm", str(file), "--environment", "h100").out
    assert "component decode" in text
    assert "component prefill" in text
    marks = run("check", "--engine", "vllm", str(file), "--environment", "h100", "--format", "github").out
    assert "service.yaml,line=6," in marks
    assert "name one" in run("engine", "vllm", str(file), "--format", "json").err


def test_files_of_flags_are_found_inside_a_deployment(tmp_path):
    """TensorRT-LLM's file is a part of a recipe, or a text in a configuration map; problems have their lines."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {path: a}\nbackend:\n  type: trtllm\n  trtllm_config:\n    decode:\n      max_batch_size: 24\n"
        "      cuda_graph_config:\n        batch_sizes: [1, 2]\n"
    )
    emulation = emulate("tensorrt-llm", [str(recipe)], H100)
    assert (emulation.limits.max_num_reqs, emulation.sizes) == (24, (1, 2))
    recipe.write_text(recipe.read_text().replace("[1, 2]", "[1, x]"))
    with pytest.raises(FlagError) as error:
        emulate("tensorrt-llm", [str(recipe)], H100)
    assert error.value.problems[0].line == 8
    graph = tmp_path / "graph.yaml"
    graph.write_text(
        "spec:\n  services:\n    decode:\n      extraPodSpec:\n        mainContainer:\n"
        "          command: [python3, -m, dynamo.trtllm]\n"
        "          args: [--model-path, a, --extra-engine-args, /config/decode.yaml, --publish-events-and-metrics]\n"
        "---\nkind: ConfigMap\ndata:\n  decode.yaml: |\n    max_batch_size: 12\n"
    )
    assert emulate("tensorrt-llm", [str(graph)], H100).limits.max_num_reqs == 12


NUMBERS = st.integers(0, 99)
SUMS = st.recursive(
    NUMBERS.map(str) | st.sampled_from(["A", "$B", "${B}"]),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda each: f"({each[0]} {each[1]} {each[2]})"),
    max_leaves=5,
)


@given(SUMS, NUMBERS, NUMBERS)
def test_arithmetic_is_the_shells(text, a, b):
    """``$((...))`` has its value, with the variables that are known."""
    expected = eval(text.replace("${B}", "B").replace("$B", "B"), {"A": a, "B": b})
    words = read_shell(f"A={a}\nB={b}\nvllm serve m --x $(({text}))").commands[0].words
    # Parentheses inside parentheses inside parentheses are left alone.
    assert words[-1] == str(expected) or "((" in text


@given(NUMBERS, st.integers(1, 9), NUMBERS, st.sampled_from(["$(seq {})", "`seq {}`"]))
def test_seq_is_counted_out(first, step, last, form):
    """``$(seq 8 8 64)`` is several words; with a separator inside quotes it is one."""
    numbers = [str(each) for each in range(first, last + 1, step)]
    words = read_shell(f"vllm serve --sizes {form.format(f'{first} {step} {last}')}").commands[0].words
    assert list(words[3:]) == numbers
    (command,) = read_shell(f'vllm serve --sizes "[$(seq -s, {first} {step} {last})]"').commands
    assert command.words[3] == f"[{','.join(numbers)}]"


def test_a_configuration_map_holds_files_and_variables(tmp_path):
    """Also of a command in a shell's text; a program of awk in it is a word like others."""
    graph = tmp_path / "graph.yaml"
    graph.write_text(
        "# A comment is no document.\n---\nkind: ConfigMap\nmetadata: {name: a}\ndata:\n"
        "  flags.yaml: |\n    max-num-seqs: 24\n  sizes: '[1, 2]'\n---\n"
        "kind: DynamoGraphDeployment\nspec:\n  services:\n    decode:\n      extraPodSpec:\n        mainContainer:\n"
        "          command: [bash, -c]\n          env:\n          - name: SIZES\n"
        "            valueFrom: {configMapKeyRef: {name: a, key: sizes}}\n"
        "          - {name: FILE, value: /etc/vllm/flags.yaml}\n          args:\n          - |\n"
        """            NICS="$(nvidia-smi | awk '{split("PIX (PXB", a); gsub(":", "", $1); if (f(g(1))) next}')"\n"""
        "            exec python3 -m dynamo.vllm --model m --config $FILE --frontend-decoding \\\n"
        "              --compilation-config '{\"cudagraph_capture_sizes\": '$SIZES'}'\n"
    )
    emulation = emulate("vllm", [str(graph)], H100)
    assert (emulation.limits.max_num_reqs, emulation.asked_sizes) == (24, (1, 2))


def test_slurm_recipes_merge_and_name_the_model(tmp_path):
    """``<<`` is YAML's; a repository says more of the model than a folder; a worker takes Dynamo's flags too."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {path: a, container: 'vllm/vllm-openai:v0.21.0'}\nidentity: {model: {repo: Qwen/Qwen3-8B}}\n"
        "backend:\n  vllm_config:\n    prefill: &a {max-num-seqs: 8, enforce-eager: true, dyn-reasoning-parser: b}\n"
        "    decode: {<<: *a, enforce-eager: false}\n"
    )
    words = {name: read("vllm", [f"{recipe}#{name}"]) for name in ("prefill", "decode")}
    assert words["prefill"].words == ("Qwen/Qwen3-8B", "--max-num-seqs", "8", "--enforce-eager")
    assert words["decode"].words == ("Qwen/Qwen3-8B", "--max-num-seqs", "8")
    assert "v0.21.0" in words["decode"].assumptions[0]


def test_a_quote_that_nothing_closes_is_found_at_once():
    """However many substitutions stand in it."""
    with pytest.raises(FlagError, match="a quote is not closed"):
        read_shell('echo "' + "$(a)" * 2000)
