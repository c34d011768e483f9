"""Command lines as people paste them: what stands around the server's own words changes nothing."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate, find_engine, read
from capture_planner.engines.shell import COMMENT, FLAG_LINE, SPACES, read_shell
from capture_planner.errors import FlagError

H100 = find_environment("h100")
PROGRAMS = [(name, each) for name in ("vllm", "sglang", "tensorrt-llm") for each in find_engine(name).programs]
FRONTS = [
    "",
    "A=1 VLLM_LOGGING_LEVEL=DEBUG ",
    "nohup ",
    "env A=1 ",
    "uv run --with vllm ",
    "numactl -N 0 -m 0 ",
    "CUDA_VISIBLE_DEVICES=0,1 mpirun -n 1 --oversubscribe -x A=1 ",
    "srun --mpi pmix --container-image=nvcr.io/x/y:1 trtllm-llmapi-launch ",
    "docker run -it --rm --gpus all -p 80:80 -e HF_TOKEN -e A=1 --name serve --ipc=host --shm-size 16g me/image:v1 ",
    "sudo podman run -d --device nvidia.com/gpu=all -v /a:/b --env=A=1 me/image ",
    "kubectl exec -it pod -- ",
    "$ ",
    "timeout 1h /usr/bin/time -v ",
    "cd /work && source venv/bin/activate; ",
    "set -e\nexport A=1\n# don't stop\npip install vllm\n",
]
ENDS = ["", " &", " > out.log 2>&1 &", " | tee log", " # and wait", "\n", " ; sleep 1"]
VALUES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=8)
WORDS = st.lists(
    st.one_of(st.sampled_from(["--flag", "--a=b", "-x", '{"a": "b c", "d": [1, 2]}', "--b", "m"]), VALUES), max_size=6
)


@pytest.mark.parametrize("front", FRONTS)
def test_every_program_is_found_behind_all_that_stands_in_front(front):
    """But ``serve`` alone, which is a word like others where it is not the first; a module is its file too."""
    for name, program in PROGRAMS:
        texts = [program] if program == "serve" else [front + program]
        if program.startswith("python -m "):
            module, *rest = program.split()[2:]
            texts.append(" ".join([front + "python3 /site-packages/" + module.replace(".", "/") + ".py", *rest]))
        for text in texts:
            assert read(name, [f"{text} first --flag"]).words == ("first", "--flag"), (name, text)


@given(st.sampled_from(PROGRAMS), st.sampled_from(FRONTS), st.sampled_from(ENDS), WORDS, st.data())
def test_words_around_the_servers_command_change_nothing(drawn, front, end, words, data):
    """In front of the program and behind the command, on one line or on many, whatever the words have in them."""
    name, program = drawn
    if program == "serve":  # a word like others, but in front
        front = ""
    words = ["first", *words]
    gaps = [data.draw(st.sampled_from([" ", "  ", " \\\n    "])) for _ in words]
    text = front + program + "".join(gap + shlex.quote(word) for gap, word in zip(gaps, words, strict=True)) + end
    assert read(name, [text]).words == tuple(words)


@pytest.mark.parametrize("program", ["/opt/venv/bin/vllm serve", "python3.12 -u -m vllm.entrypoints.openai.api_server"])
def test_programs_stand_with_folders_and_versions(program):
    """Whatever the interpreter's own options are."""
    assert read("vllm", [*program.split(), "m", "--port", "1"]).words == ("m", "--port", "1")
    assert read("vllm", ["docker", "run", "--entrypoint", "vllm", "me/output", "serve", "m"]).words == ("m",)


SERVICES = {
    "arrays": """
ARGS=(
  --model Qwen/Qwen3-8B  # the model
)
ARGS+=(--max-num-seqs "$SEQS")
export VLLM_USE_V2_MODEL_RUNNER=0
SEQS=16
vllm serve "${ARGS[@]}"
""",
    "split": """
OPTIONS="--max-num-seqs 16"
$ VLLM_USE_V2_MODEL_RUNNER=0 vllm serve --model Qwen/Qwen3-8B \\
> $OPTIONS
""",
    "compose": """
services:
  db: {image: postgres}
  llm:
    image: vllm/vllm-openai:v0.33.0
    environment: [HF_TOKEN=x, VLLM_USE_V2_MODEL_RUNNER=0]
    command: >
      --model Qwen/Qwen3-8B
      --max-num-seqs 16
""",
    "kubernetes": """
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
        - image: vllm/vllm-openai:v0.33.0
          command: [/bin/sh, -c]
          args:
            - |
              vllm serve --model Qwen/Qwen3-8B \\
                --max-num-seqs $(SEQS)
          env:
            - {name: SEQS, value: "16"}
            - {name: VLLM_USE_V2_MODEL_RUNNER, value: "0"}
---
kind: Service
""",
    "list": '["VLLM_USE_V2_MODEL_RUNNER=0", "--model", "Qwen/Qwen3-8B", "--max-num-seqs", "16"]',
    "script": """#!/bin/bash
export VLLM_USE_V2_MODEL_RUNNER=0
MODEL=Qwen/Qwen3-8B
cat << EOF > config.yaml
vllm serve other
EOF
exec vllm serve --model "${MODEL}" --max-num-seqs ${SEQS:-16} >> log 2>&1
""",
}


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize("way", ["quoted", "file", "stdin"])
def test_services_and_scripts_are_read(kind, way, tmp_path, monkeypatch):
    """In quotes, as a file, and from standard input: the container's arguments, with its variables put in."""
    text = SERVICES[kind]
    file = tmp_path / ("service.yaml" if kind in ("compose", "kubernetes") else "run.sh")
    file.write_text(text, "utf-8")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    found = read("vllm", [{"quoted": text, "file": str(file), "stdin": "-"}[way]])
    assert found.words == ("VLLM_USE_V2_MODEL_RUNNER=0", "--model", "Qwen/Qwen3-8B", "--max-num-seqs", "16")


def test_folders_and_files_of_flags_stay_what_they_are(tmp_path):
    """A model's folder is one, with a space in its name too; a file of flags is for ``--config``."""
    folder = tmp_path / "my model"
    folder.mkdir()
    flags = tmp_path / "flags.yaml"
    flags.write_text("max-num-seqs: 4\n", "utf-8")
    for name in (str(folder), str(flags), "Qwen/Qwen3-8B"):
        assert read("vllm", [name]).words == (name,)


WRONG = [
    ("vllm", "vllm serve a\nvllm serve b", "2 commands start it: a; b"),
    ("vllm", "python -m sglang.launch_server --tp 2", "this starts sglang; name sglang as the engine"),
    ("sglang", "vllm serve a", "this starts vllm; name vllm as the engine"),
    ("vllm", "vllm bench serve --model a", "this starts no server of vllm"),
    ("vllm", "python my_server.py --tp 2", "this starts no server of vllm"),
    ("vllm", "cd /a\nls", "no command here starts it"),
    ("vllm", "vllm serve a --chat-template 'b", "a quote is not closed"),
    ("tensorrt-llm", "docker run rocm/x:latest trtllm-serve a", "for a device that is not emulated"),
    ("vllm", "vllm serve Qwen/Qwen3-8B --max-num-seqs $SEQS", "write SEQS=VALUE in front of it"),
    ("sglang", "python -m sglang.launch_server --tp ${TP}", "write TP=VALUE in front of it"),
]


@pytest.mark.parametrize(("engine", "text", "says"), WRONG)
def test_lines_that_start_no_server_say_what_they_start(engine, text, says):
    """Each with what to give."""
    with pytest.raises(FlagError) as error:
        emulate(engine, [text], H100)
    (problem,) = error.value.problems
    assert says in str(problem)


def test_what_a_shell_would_read_otherwise_is_an_assumption():
    """Lines that lost their backslash, spaces behind one, and a comment between lines."""
    text = "vllm serve a \\\n  # why\n --b 1 \\  \n --c\n--d 2"
    found = read("vllm", [text])
    assert found.words == ("a", "--b", "1", "--c", "--d", "2")
    assert found.assumptions == (COMMENT, SPACES, FLAG_LINE)


def test_variables_that_decide_nothing_are_one_note():
    """Those that decide stay; those that a script does not export are another note."""
    text = "VLLM_USE_BREAKABLE_CUDAGRAPH=1\nNCCL_DEBUG=1 VLLM_USE_V2_MODEL_RUNNER=0 VLLM_X=1 vllm serve Qwen/Qwen3-8B"
    emulation = emulate("vllm", [text, *()], H100)
    assert emulation.command == ("VLLM_USE_V2_MODEL_RUNNER=0", "Qwen/Qwen3-8B")
    assert emulation.notes == (
        "skipped, as they decide nothing about graphs: NCCL_DEBUG, VLLM_X",
        "set and not exported, so the server does not see them: VLLM_USE_BREAKABLE_CUDAGRAPH",
    )
    assert emulation.assumptions == ()


IMAGES = [
    ("vllm", "vllm/vllm-openai:v0.20.0-x86_64-cu130", "runs vllm 0.20.0"),
    ("vllm", "vllm/vllm-openai:v0.40.0", "what differs is not known"),
    ("sglang", "lmsysorg/sglang:v0.5.8-cu130 sglang serve --model-path", "prefills have no graphs"),
]


@pytest.mark.parametrize(("engine", "image", "says"), IMAGES)
def test_the_age_of_an_image_is_an_assumption(engine, image, says):
    """With what that release does otherwise by default; that of the emulated release is none."""
    (found,) = emulate(engine, [f"docker run {image} Qwen/Qwen3-8B"], H100).assumptions
    assert says in found
    assert "assumptions" in json.dumps({"assumptions": [found]})
    release = find_engine(engine).version
    current = image.replace(image.split(":v")[1].split("-")[0].split()[0], release)
    assert emulate(engine, [f"docker run {current} Qwen/Qwen3-8B"], H100).assumptions == ()


def subsets(items):
    """Return every choice of items, in every order."""
    return [each for count in range(len(items) + 1) for each in itertools.permutations(items, count)]


LONGER = [
    ("vllm", "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "vllm serve Qwen/Qwen3-8B --max-model-len 100000"),
    (
        "sglang",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
        "sglang serve --model Qwen/Qwen3-8B --context-length 100000",
    ),
]


@pytest.mark.parametrize(("engine", "variable", "line"), LONGER)
def test_a_length_beyond_the_models_needs_its_variable(engine, variable, line):
    """As the engine does: it stops, and names the variable that lets it go on."""
    with pytest.raises(FlagError):
        emulate(engine, [f"{variable}=0 {line}"], H100)
    settings = {each.name: each.value for each in emulate(engine, [f"{variable}=1 {line}"], H100).settings}
    assert 100000 in settings.values()


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    """No text ends in another error."""
    with contextlib.suppress(FlagError):
        assert all(word for command in read_shell(text).commands for word in command.words[:1])
        assert read("vllm", [text]).assumptions in subsets((COMMENT, SPACES, FLAG_LINE))


@pytest.mark.parametrize(
    "text",
    ["A=xx\n" + "A=$A$A\n" * 60 + "vllm serve $A", "A=(x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60 + "vllm serve m"],
)
def test_a_value_without_end_is_refused(text):
    """Sixty lines that double it are some 1,000 characters."""
    with pytest.raises(FlagError, match="too long"):
        read_shell(text)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("cat <<A > f\nx\n\tA \ny", "cat  > f\ny"),
        ("cat <<'A'\nA\ny", "cat \ny"),
        ("cat <<A <<B\nx\nB\ny", "cat <<A \ny"),
        ("cat <<A\nA b\ny", "cat <<A\nA b\ny"),
    ],
)
def test_a_document_ends_at_its_word(text, kept):
    """At the next line that is the word alone; without one, nothing is left out."""
    assert read_shell(text).commands == read_shell(kept).commands


def test_a_script_beside_its_flags_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a suffix that no model has."""
    monkeypatch.chdir(tmp_path)
    Path("serve.txt").write_text("vllm serve m --max-num-seqs 3", "utf-8")
    assert read("vllm", ["serve.txt"]).words == ("m", "--max-num-seqs", "3")


OTHER_DEVICES = [
    ("vllm", "docker run --device /dev/kfd rocm/vllm:latest vllm serve a --max-num-seqs 300", "rocm/vllm:latest"),
    ("vllm", "ASCEND_RT_VISIBLE_DEVICES=0 vllm serve a --max-num-seqs 300", "ASCEND_RT_VISIBLE_DEVICES"),
    ("vllm", "VLLM_ROCM_USE_AITER=1 vllm serve a --max-num-seqs 300", "VLLM_ROCM_USE_AITER"),
    ("vllm", "vllm serve a --attention-backend ROCM_AITER_FA --max-num-seqs 300", "ROCM_AITER_FA"),
    ("vllm", "vllm serve a --additional-config.torchair_graph_config.a 1 --max-num-seqs 300", "torchair_graph_config"),
    ("sglang", "SGLANG_USE_AITER=1 sglang serve --model-path a --max-running-requests 300", "SGLANG_USE_AITER"),
    ("sglang", "sglang serve --model-path a --attention-backend aiter --max-running-requests 300", "aiter"),
    ("sglang", "sglang serve --model-path a --device npu --max-running-requests 300", "npu"),
]


@pytest.mark.parametrize(("name", "text", "sign"), OTHER_DEVICES)
def test_flags_alone_answer_for_other_devices(name, text, sign):
    """ROCm's variables decide something: the device. Limits that flags give hold, and so do the graphs at most."""
    emulation = emulate(name, [text], H100)
    assert emulation.by_flags.startswith(f"{sign} is for a device that is not NVIDIA's")
    assert emulation.limits.max_num_reqs == 300
    assert emulation.assumptions[0].startswith(emulation.by_flags)
    if "=" in text.split()[0] or "docker" in text:
        plain = emulate(name, [word for word in emulation.command if sign not in word], H100)
        assert {graph.entry for graph in plain.graphs} <= {graph.entry for graph in emulation.graphs}


@pytest.mark.parametrize(("machine", "rests"), [("b200", True), ("a100", False)])
def test_full_graphs_of_verifications_rest_on_cubins(machine, rests):
    """From Hopper on FlashInfer's kernel for several tokens of a request comes as a binary of its own."""
    flags = ["Qwen/Qwen3-8B", "--attention-backend", "FLASHINFER", "-sc.method=ngram", "-sc.num_speculative_tokens=3"]
    said = emulate("vllm", flags, find_environment(machine)).assumptions
    assert any("flashinfer-cubin" in each for each in said) == rests
