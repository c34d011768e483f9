"""Files: every mistake has its place and its words, and nothing is coerced."""

import json
import re
import textwrap

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.errors import CapturePlannerError, InvalidDocument
from capture_planner.modes import Role
from capture_planner.records._base import replace
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Decision, Plan
from capture_planner.records.spec import Spec
from capture_planner.testing import arbitrary_plans, environments, specs

CONTROLS = ("\x1b]0;owned\x07", "\x9b2J", "\u202e", "\u2066", "\x7f", "\u2028", "\U000e0041", "\x00")
HEAD = """\
version: 1
model: {name: m, num_layers: 2, num_heads: 8, num_kv_heads: 2, head_dim: 64, max_model_len: 4096}
limits: {max_num_reqs: 8, max_num_tokens: 64}
backend: alpha
"""


def refused(text, kind=Spec):
    """The problems of a text that must be refused, one line each."""
    with pytest.raises(InvalidDocument) as caught:
        codec.loads(text, kind, "f.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_the_head_is_a_spec():
    """What the other tests damage is whole."""
    assert codec.loads(HEAD, Spec).limits.max_num_reqs == 8


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("budget: {max_graphs: 8.7}", "5:22: budget.max_graphs: expected an integer, got 8.7"),
        ('budget: {max_graphs: "8"}', "5:22: budget.max_graphs: expected an integer, got '8'"),
        ("budget: {max_graphs: true}", "5:22: budget.max_graphs: expected an integer, got true"),
        ("budget: {seconds: yes}", "5:19: budget.seconds: expected a number, got 'yes'"),
        ("budget: {seconds: -1}", "5:19: budget.seconds: must be more than 0, got -1"),
        ("parallel: {sequence: no}", "5:22: parallel.sequence: expected true or false, got 'no'"),
        ("parallel: {sequence: 1}", "5:22: parallel.sequence: expected true or false, got 1"),
        (
            "budget: {memory: 2GB}",
            "5:18: budget.memory: expected a size, got '2GB'; "
            "write a whole number of B, KiB, MiB, GiB or TiB, as in 2GiB",
        ),
        ("budget: {max_graphs: 0}", "5:22: budget.max_graphs: must be at least 1, got 0"),
        ("lora: 3", "5:7: lora: expected a mapping, got 3"),
        ("lora: {}", "5:7: lora.max_active: is missing; it has no default"),
        (
            "mode: FULL_DECODE",
            "5:7: mode: expected one of NONE, PIECEWISE, FULL_DECODE_ONLY, FULL_AND_PIECEWISE, FULL, "
            "got 'FULL_DECODE'; did you mean FULL_DECODE_ONLY?",
        ),
        ("budget: {mixed: 3}", "5:10: budget.mixed: unknown key; did you mean budget.graphs.mixed?"),
        (
            "speculative: {method: eagle, num_tokens: 2, backend: x}",
            "5:45: speculative.backend: unknown key; did you mean roles.draft_decode.backend?",
        ),
        ("specluative: {}", "5:1: specluative: unknown key; did you mean speculative?"),
        ("sizes: {policy: explicit, num_reqs: 8}", "5:37: sizes.num_reqs: expected a list, got 8"),
        ("sizes: {policy: explicit, num_reqs: [1, 0]}", "5:41: sizes.num_reqs[1]: must be at least 1, got 0"),
        (
            "speculative: {method: eagle, num_tokens: 2, schedule: [[1, 2]]}",
            "5:56: speculative.schedule[0]: expected a list of 3, got 2 items",
        ),
        ("pool: 3", "5:7: pool: expected one of shared, per_role, got 3"),
    ],
)
def test_a_mistake_has_its_place_and_its_words(line, problem):
    """``file:line:column: path: what is wrong, what was expected``."""
    assert refused(HEAD + line + "\n") == [f"f.yaml:{problem}"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\na: 2\n", "2:1: the key 'a' is given twice, first in line 1"),
        ("1: a\n", "1:1: a key must be text, got 1"),
        ("a: !!int 3\n", "1:4: the tag tag:yaml.org,2002:int is not allowed; write plain values"),
        ("a: 1\n---\nb: 2\n", "2:1: a second document; a file holds one"),
        ("a: *b\n", "1:4: the alias *b names nothing that is complete"),
        ("a: &a [*a]\n", "1:8: the alias *a names nothing that is complete"),
        ("a: " + "[" * 40 + "]" * 40 + "\n", "1:35: nested more than 32 deep"),
    ],
)
def test_what_a_plan_file_has_no_use_for_is_refused(text, problem):
    """Keys that are not text or given twice, tags, second documents, aliases without end, depth."""
    assert refused(text) == [f"f.yaml:{problem}"]


@pytest.mark.parametrize("text", ["a: [1\n", "a: 'b\n", "\tx: 1\n", "a: b: c\n", "%YAML 1.0\n---\na: 1\n"])
def test_what_is_not_yaml_is_refused_with_its_place(text):
    """One line, no traceback."""
    problems = refused(text)
    assert problems
    assert all(problem.startswith("f.yaml:") for problem in problems)


@given(
    st.lists(
        st.sampled_from(("# Title\n", "a: 1\n", "  - b\n", "text\n", "[1, ", "{a: ", "]", "? ", "- ", "'", "---\n"))
    )
)
def test_syntax_errors_have_no_words_of_the_parser(pieces):
    """Tokens such as ``<block mapping start>``; a file that was not meant is the most frequent cause."""
    assert not re.search("<[a-z ]+>", "".join(refused("".join(pieces))))


@pytest.mark.parametrize("whole", ["", "3", "[]", "a"])
def test_a_file_that_is_no_mapping_is_refused(whole):
    """A spec is a mapping."""
    assert "expected a mapping" in refused(whole)[0]


def test_all_mistakes_come_at_once_in_the_order_of_the_file():
    """Four mistakes, four lines."""
    text = HEAD.replace("max_num_reqs: 8", "max_num_reqs: 0") + textwrap.dedent(
        """\
        pool: mine
        parallel: {tensor: 0}
        nonsense: 1
        """
    )
    lines = [int(problem.split(":")[1]) for problem in refused(text)]
    assert lines == [3, 5, 6, 7]


def test_aliases_that_explode_are_refused_quickly():
    """Each level holds the one below ten times."""
    levels = ["a0: &a0 [x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert re.search(r"more than \d+ values, aliases expanded", refused("\n".join(levels))[0])


def test_an_alias_means_what_it_names():
    """Anchors may be used with sense."""
    text = HEAD.replace("max_num_reqs: 8", "max_num_reqs: &n 8") + "budget: {max_graphs: *n}\n"
    assert codec.loads(text, Spec).budget.max_graphs == 8


def test_a_newer_version_names_the_remedy():
    """And nothing else is looked at."""
    assert refused("version: 2\nfuture: 1\n") == [
        "f.yaml:1:10: version: schema version 2, but this capture-planner reads 1; upgrade capture-planner"
    ]


def test_packages_are_checked_key_and_value():
    """Names and versions."""
    text = "version: 1\nname: e\ndevice: {kind: cpu, name: c, memory: 1GiB}\npackages: {torch: 2, a$: '1'}\n"
    problems = refused(text, Environment)
    assert len(problems) == 2
    assert all("packages" in problem for problem in problems)
    assert "expected a mapping" in refused(text.split("packages")[0] + "packages: []\n", Environment)[0]


def test_a_plan_is_told_from_a_spec_by_its_roles():
    """A list of roles is a plan's; a mapping of them, or none, is a spec's."""
    texts = (HEAD, HEAD + "roles: {}\n", "version: 1\nroles: []\n", "3\n")
    assert [codec.Document.parse(text, "f.yaml").is_plan for text in texts] == [False, False, True, False]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: \xff\n", "not UTF-8 text, at byte 3"),
        (b"#" * ((1 << 20) + 1), "the file is larger than 1 MiB"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, content, message):
    """Not UTF-8, too large, missing."""
    path = tmp_path / "f.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidDocument) as caught:
        codec.load_spec(path)
    assert str(caught.value) == f"{path}: {message}"


def test_text_over_the_limit_is_refused():
    """As a file would be."""
    assert refused("#" * ((1 << 20) + 1)) == ["f.yaml: the file is larger than 1 MiB"]


@pytest.mark.parametrize(
    ("load", "kind", "strategy"),
    [
        (codec.load_spec, Spec, specs()),
        (codec.load_environment, Environment, environments()),
        (codec.load_plan, Plan, arbitrary_plans()),
    ],
)
def test_files_are_read_back(tmp_path_factory, load, kind, strategy):
    """Written and read through a file."""
    path = tmp_path_factory.mktemp("files") / "f.yaml"

    @given(strategy)
    def check(value):
        codec.write(path, codec.dumps(value))
        assert load(path) == value
        assert path.read_text(encoding="utf-8").startswith(codec.HEADER) == (kind is Plan)

    check()


def test_a_failing_write_leaves_the_old_file(tmp_path):
    """Whole or not at all: text that cannot be encoded, and nothing is left beside it."""
    path = tmp_path / "f.yaml"
    codec.write(path, "old\n")
    with pytest.raises(UnicodeEncodeError):
        codec.write(path, "new \ud800\n")
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_to_nowhere_says_so(tmp_path):
    """A folder that is not there."""
    with pytest.raises(CapturePlannerError, match="cannot be written: No such file or directory"):
        codec.write(tmp_path / "no" / "f.yaml", "x")


def test_a_write_keeps_the_mode_of_the_file(tmp_path):
    """A file that only its owner reads stays so."""
    path = tmp_path / "f.yaml"
    path.write_text("old")
    path.chmod(0o600)
    codec.write(path, "new")
    assert path.stat().st_mode & 0o777 == 0o600


@given(st.integers(0, 1 << 60))
def test_bytes_are_written_exactly(value):
    """In the largest unit that divides them, and read back from it."""
    text = HEAD + f"budget: {{memory: {codec.format_bytes(value)}}}\n"
    assert codec.loads(text, Spec).budget.memory == value


@pytest.mark.parametrize(("value", "text"), [(0, "0B"), (1023, "1023B"), (1536 << 20, "1536MiB"), (2 << 40, "2TiB")])
def test_bytes_read_well(value, text):
    """No fractions."""
    assert codec.format_bytes(value) == text


def test_text_is_text_whatever_it_looks_like():
    """Names such as no, 8 and 1e3 survive in quotes."""
    for name in ("no", "true", "8", "8.7", "1e3", "0x1F", "null"):
        spec = codec.loads(HEAD.replace("name: m,", f"name: '{name}',"), Spec)
        assert codec.loads(codec.dumps(spec), Spec).model.name == name


@pytest.mark.parametrize("number", ["9" * 420, "-" + "9" * 420, "1e999"])
def test_number_out_of_range_is_said_to_be_so(number):
    (problem,) = refused(HEAD.replace("max_num_reqs: 8", f"max_num_reqs: {number}"))
    assert problem.startswith("f.yaml:3:")
    assert problem.endswith("is out of range")
    assert len(problem) < 120


def test_many_unknown_keys_are_not_all_listed():
    """Nor are the known ones listed with each."""
    problems = refused(HEAD + "".join(f"key{number}: 1\n" for number in range(500)))
    assert len(problems) == 101
    assert problems[-1] == "f.yaml: 400 more problems, which are not listed"
    assert sum("known are" in problem for problem in problems) == 1
    assert sum(map(len, problems)) < 10_000


@pytest.mark.parametrize("key", ["\x1b[31mkey", "a key", "k" * 100_000, "\u202e"])
def test_unknown_key_that_needs_quotes_has_its_place(key):
    """And reaches no terminal as it is."""
    (problem,) = refused(HEAD + json.dumps(key) + ": 1\n") if len(key) < 1000 else refused(HEAD + f"? {key}\n: 1\n")
    assert problem.startswith(("f.yaml:5:1: ", "f.yaml:5:3: ", "f.yaml: more than", "f.yaml:1:1"))
    assert problem.isprintable()
    assert len(problem) < 400


@given(arbitrary_plans(), st.sampled_from(CONTROLS), st.data())
def test_no_file_or_json_has_a_control_character_in_it(plan, control, data):
    """Characters that a terminal acts on are written as their numbers, and read again."""
    text = data.draw(st.text(max_size=3)) + control
    said = Decision(rule="of-a-test", before=text, after=text, role=Role.TARGET, message=text)
    assume(plan.roles)
    changed = replace(plan, roles=(replace(plan.roles[0], decisions=(said,)), *plan.roles[1:]))
    written = codec.dumps(changed)
    as_json = codec.dumps_json(codec.to_data(changed))
    assert all(line.isprintable() for line in (written + as_json).split("\n"))
    assert codec.loads(written, Plan) == changed
    assert json.loads(as_json)["roles"][0]["decisions"][0]["says"] == text


LIKE_YAML = st.text("ab \n#:-'\"{}[],&*!|>%@`0123456789.eE_yno", max_size=12)
MANIFESTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text() | LIKE_YAML,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | LIKE_YAML, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abc/.-", min_size=1, max_size=4), MANIFESTS, min_size=1, max_size=4))
def test_plain_data_is_read_as_it_was_by_yaml_1_1(data):
    """Kubernetes and Helm read YAML 1.1, in which ``no`` is false and ``12:30`` a number; texts of lines stay whole."""
    assert yaml.safe_load(codec.dumps_plain(data)) == data


def test_texts_of_several_lines_are_blocks():
    """A plan in a manifest is as it is in its own file."""
    assert codec.dumps_plain({"a": ["x", "b: 1\n\nc: 2\n"]}) == "a:\n  - x\n  - |\n    b: 1\n\n    c: 2\n"
