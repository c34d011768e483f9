"""Inputs for the fuzzer that are no documents: plugins, traces, prompts, texts of plans, and outputs.

Each input is a folder of its own, made from a seed and an index. What uses it may raise ``CapturePlannerError`` only,
may open nothing outside of the folder but installed code, may start no program, and may print no control character.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from tokenizers import Tokenizer, models, pre_tokenizers

CONTROLS = ("\x1b]0;owned\x07", "\x1b[31m", "\x9b2J", "\u202e", "\u2066", "\x00", "\r", "\x7f", "\u2028", "\U000e0041")
"""What a terminal, or an eye, takes for something else than text."""

ODD: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    3,
    7,
    33,
    10**30,
    0.5,
    float("nan"),
    True,
    None,
    "x",
    "",
    "../x",
    [],
    [1],
    {},
    {"a": 1},
    *CONTROLS,
)
"""Values that no field of a configuration expects."""


@attrs.frozen
class Input:
    """What was written into a folder."""

    made_by: str
    files: tuple[Path, ...] = ()
    must_refuse: bool = False
    """Whether a use that succeeds is a violation: its index leaves the folder, or names what is absent."""
    words: tuple[str, ...] = ()


# Plugins ---------------------------------------------------------------------------------------

_ERRORS = (
    *("ValueError('no')", "SystemExit(3)", "Odd('base')", "RecursionError()", "MemoryError()", "Mute()", "OSError(5)"),
    *("GeneratorExit()", "ImportError('\\x1b]0;owned\\x07')", "UnicodeDecodeError('utf-8', b'', 0, 1, '\\u202e')"),
)
_HEAD = """
from capture_planner.plugins import hookimpl
def real(): import capture_planner_reference as r; return r.capture_planner_backends()
class Odd(BaseException): pass
class Mute(Exception):
    def __str__(self): raise ValueError('mute')
class Hidden:
    def __repr__(self): raise ValueError('hidden')
    def __getattr__(self, name): raise ValueError(name)
def fail(error): raise error
class Backend:
    name = 'odd'
    def __init__(self, **changes): self.__dict__.update(changes)
    def __getattr__(self, name):
        if name.startswith('__'): raise AttributeError(name)
        return getattr(list(real())[0], name)
"""


def plugin(rng: random.Random, folder: Path, index: int) -> Input:
    """Write an installed distribution whose plugin is broken, or a little odd."""
    module = f"odd_plugin_{index}"
    error, call = rng.choice(_ERRORS), rng.choice(("support", "padding", "refresh", "workspace"))
    brings = (
        *("None", "5", "[None]", "['x']", "[Hidden()]", f"(fail({error}) for _ in 'a')", f"fail({error})", "[]"),
        *("real()", "[Backend(name='')]", "[Backend(name='\\x1b[31m')]", "[Backend(name=5)]", "[Backend()]"),
        *("[Backend(), Backend()]", f"[Backend({call}=lambda *_: 3)]", f"[Backend({call}=lambda *_: fail({error}))]"),
        *(f"[Backend({call}=lambda: None)]", f"[Backend({call}=5)]", f"[Backend({call}=lambda *_: Hidden())]"),
    )
    bring = rng.choice(brings)
    hook = rng.choice(("capture_planner_backends",) * 4 + ("capture_planner_engines", "capture_planner_backend", "x"))
    signature = rng.choice(("()",) * 6 + ("(config)", "(*a)"))
    marker = rng.choice(("@hookimpl\n",) * 6 + ("",))
    source = f"{_HEAD}\n{marker}def {hook}{signature}:\n    return {bring}\n"
    made_by = f"{marker.strip()} {hook}{signature}: {bring}"
    if rng.random() < 0.25:
        whole = (
            "def",
            "raise " + error,
            "\0",
            "import no_such_module",
            "x = 1",
            "def __getattr__(n): raise ValueError(n)",
        )
        source = made_by = _HEAD + rng.choice(whole)
        made_by = source.rpartition("\n")[2]
    (folder / f"{module}.py").write_text(source, "utf-8")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    name = rng.choice((f"odd-plugin-{index}", "capture-planner-reference"))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8")
    value = rng.choice((module,) * 8 + (f"{module}:missing", "no_such_module_either", f"{module}:real"))
    (info / "entry_points.txt").write_text(f"[capture_planner]\nodd = {value}\n", "utf-8")
    return Input(made_by=made_by, words=(module,))


# Requests --------------------------------------------------------------------------------------

_ROWS = "TIMESTAMP,ContextTokens,GeneratedTokens\n0.0,4,3\n0.5,7,2\n1.5,1,1\n"
_LINES = "alpha beta\n\ngamma delta alpha\n"
_OBJECTS = '{"prompt": "alpha beta", "max_new_tokens": 3, "arrival": 0.5}\n{"prompt": "gamma"}\n'
_BITS = (
    *(
        "\0",
        "\ufeff",
        "\r",
        "\r\n",
        "\n",
        ",",
        '"',
        "'",
        "-1",
        "1e400",
        "9" * 400,
        "nan",
        "inf",
        "2023-11-16 18:17:03.97",
    ),
    *(
        "2023-11-16T18:17:03Z",
        "9999-99-99 99:99:99",
        "{",
        "[",
        "[" * 100_000,
        "null",
        '"\\ud800"',
        "é",
        "\t",
        ";",
        *CONTROLS,
    ),
)


def changed(rng: random.Random, text: str) -> bytes:
    """Return a text with a few cuts, copies and strange insertions."""
    data = text.encode()
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        at, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        kind = rng.randrange(4)
        if kind == 0:
            data = data[:at] + data[min(end, at + rng.choice((1, 5, 500))) :]
        elif kind == 1:
            data = data[:end] + data[at:end] * rng.choice((1, 2, 50)) + data[end:]
        elif kind == 2:
            data = data[:at] + rng.randbytes(rng.choice((1, 4))) + data[at:]
        else:
            data = data[:at] + rng.choice(_BITS).encode("utf-8", "surrogatepass") + data[at:]
    return data


def trace(rng: random.Random, folder: Path) -> Input:
    """Write a trace."""
    file = folder / "trace.csv"
    file.write_bytes(changed(rng, _ROWS))
    return Input(made_by="trace", files=(file,))


def prompts(rng: random.Random, folder: Path) -> Input:
    """Write a file of prompts, and the folder of a tokenizer."""
    file, text = rng.choice(((folder / "p.txt", _LINES), (folder / "p.jsonl", _OBJECTS)))
    file.write_bytes(changed(rng, text))
    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "alpha": 2, "beta": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<eos>"})
    if broken := rng.random() < 0.4:
        config = json.dumps(json.loads(config) | {rng.choice(("tokenizer_class", "eos_token", "x")): rng.choice(ODD)})
        if rng.random() < 0.3:
            config = json.dumps(json.loads(config) | {"auto_map": {"AutoTokenizer": ["own.Own", None]}})
            (folder / "own.py").write_text("import os\nos.system('echo executed')\n", "utf-8")
    own = words.to_str()
    (folder / "tokenizer.json").write_bytes(changed(rng, own) if broken and rng.random() < 0.5 else own.encode())
    (folder / "tokenizer_config.json").write_text(config, "utf-8")
    return Input(made_by=f"prompts {file.suffix}{', other tokenizer' if broken else ''}", files=(file, folder))


# Text and outputs ------------------------------------------------------------------------------


def plan_text(rng: random.Random, folder: Path, plan: dict[str, Any]) -> Input:
    """Write a plan with control characters in some of its texts."""
    data = json.loads(json.dumps(plan))
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            if isinstance(node[key], str):
                places.append((node, key))
            elif isinstance(node[key], dict | list):
                walk(node[key])

    walk(data)
    likely = [
        place for place in places if place[1] in ("says", "before", "after", "version", "reason", "formula", "cause")
    ]
    for _ in range(rng.choice((1, 2, 5))):
        node, key = rng.choice(likely if likely and rng.random() < 0.8 else places)
        at = rng.randrange(len(node[key]) + 1)
        node[key] = node[key][:at] + rng.choice(CONTROLS) + node[key][at:]
    if rng.random() < 0.1:
        data[rng.choice(CONTROLS) + "key"] = 1
    file = folder / "plan.yaml"
    file.write_text(json.dumps(data, ensure_ascii=rng.random() < 0.5), "utf-8")
    return Input(made_by="plan text", files=(file,))


def output(rng: random.Random, folder: Path, spec: str, plan: str) -> Input:
    """Write a spec, and something in the place where a plan is to be written."""
    source, target = folder / "spec.yaml", folder / "out.yaml"
    source.write_text(spec, "utf-8")

    def read_only() -> None:
        target.write_text(plan, "utf-8")
        target.chmod(0o444)

    def long_loop() -> None:
        target.symlink_to("other")
        (folder / "other").symlink_to(target.name)

    def link() -> None:
        (folder / "p.yaml").write_text(plan, "utf-8")
        target.symlink_to("p.yaml")

    kinds: dict[str, Callable[[], object]] = {
        "new": lambda: None,
        "a plan": lambda: target.write_text(plan, "utf-8"),
        "a read-only plan": read_only,
        "a spec": lambda: target.write_text(spec, "utf-8"),
        "a loop": lambda: target.symlink_to(target.name),
        "a long loop": long_loop,
        "a link to nothing": lambda: target.symlink_to("nothing"),
        "a link to no folder": lambda: target.symlink_to("no/such/folder"),
        "a link to a plan": link,
        "a folder": target.mkdir,
        "junk": lambda: target.write_bytes(rng.randbytes(20)),
        "empty": lambda: target.write_bytes(b""),
    }
    kind = rng.choice(list(kinds))
    kinds[kind]()
    odd = ("x" * 300, "", "no/such/file.yaml", "spec.yaml", "spec.yaml/out", "/dev/null", "/dev/full", "-", "\x1b[31m")
    name = rng.choice(
        (str(target),) * 3 + tuple(str(folder / each) if each and each[0] != "/" else each for each in odd)
    )
    command = rng.choice((("plan", str(source), "-e", "cpu"), ("environment",)))
    return Input(made_by=f"{command[0]} -o {kind}", files=(source,), words=(*command, "-o", name))
