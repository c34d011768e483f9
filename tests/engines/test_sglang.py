"""Laws of the emulation of SGLang that need no engine: what it captures, how it answers, what it refuses."""

from __future__ import annotations

from pathlib import Path
from random import Random

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner.engines.emulation import Emulation
from capture_planner.errors import DispatchError, FlagError, NotEmulated
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch
from capture_planner_sglang.emulation.engine import ENGINE, emulate
from capture_planner_sglang.emulation.flags import TABLE
from capture_planner_sglang.emulation.managers import decode_sizes, prefill_sizes, ranks_bucket
from engines.generators import sglang as drawing

H100 = drawing.environment("h100")
BASE = ["--model-path", "a-model"]
EAGLE = [*BASE, "--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
VALUES: dict[str, list[str]] = {"switch": [], "one": ["x"], "list": ["1"]}


def drawn(seed: int, folder: Path) -> tuple[Emulation, list[Batch]]:
    """Emulate a drawn launch with its batches; a refused one is no example."""
    random = Random(seed)
    case = drawing.case(random)
    try:
        emulation = emulate(drawing.written(case, folder), case.environment)
    except FlagError:
        assume(False)
        raise
    return emulation, [b for b in drawing.batches(random, 20, loras=True) if b.role in emulation.modes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the drawn launches' files."""
    return tmp_path_factory.mktemp("launches")


@given(seed=st.integers(0, 1 << 30))
def test_setting_sources_are_a_flag_the_file_a_default_or_a_rule(folder: Path, seed: int) -> None:
    """A rule is one of the decisions, and a file's value is the source only where there is a file."""
    emulation, _ = drawn(seed, folder)
    plain = {"flag", "default"} | ({"file"} if "--config" in emulation.command else set())
    rules = {decision.rule for decision in emulation.decisions}
    for setting in emulation.settings:
        of_model = setting.name in ("model_path", "model_facts", "context_length")
        allowed = plain | rules | ({"model", "assumed"} if of_model else set())
        assert setting.source in allowed, setting


PHASES = "cuda_graph_config"
NULL = '{"decode": {"bs": null, "max_bs": null}, "prefill": {"bs": null, "max_bs": null}}'


@pytest.mark.parametrize(
    ("flags", "name", "value", "source"),
    [
        (["--cuda-graph-bs-decode", "8", "2"], f"{PHASES}.decode.bs", [8, 2], "flag"),
        (["--cuda-graph-bs-decode", "8", "2"], f"{PHASES}.decode.max_bs", 8, "flag"),
        (
            ["--cuda-graph-bs-decode", "8", "--cuda-graph-max-bs-decode", "4"],
            f"{PHASES}.decode.max_bs",
            8,
            "decode-list-wins",
        ),
        (["--max-running-requests", "9"], f"{PHASES}.decode.max_bs", 9, "decode-max-by-requests"),
        ([], f"{PHASES}.decode.max_bs", 256, "decode-max-by-memory"),
        ([], f"{PHASES}.prefill.max_bs", 8192, "chunk-by-memory"),
        (["--chunked-prefill-size", "512"], f"{PHASES}.prefill.max_bs", 512, "flag"),
        (["--max-total-tokens", "300"], f"{PHASES}.prefill.max_bs", 300, "prefill-max-by-pool"),
        (["--pp-size", "2"], f"{PHASES}.prefill.backend", "disabled", "pipeline-prefill"),
        (["--disable-cuda-graph"], f"{PHASES}.prefill.backend", "disabled", "flag"),
        (["--tp-size", "2", "--attn-dp-size", "2"], f"{PHASES}.prefill.max_bs", 4096, "prefill-max-per-rank"),
        (["--max-total-tokens", "300"], "request_pool", 150, "requests-by-pool"),
        (["--max-running-requests", "9"], "request_pool", 9, "flag"),
        ([], "request_pool", 2048, "default"),
    ],
)
def test_setting_source_is_the_flag_or_the_last_rule(flags: list[str], name: str, value: object, source: str) -> None:
    """The flag that gave it, or the rule that wrote it last."""
    emulation = emulate([*BASE, *flags], H100)
    (found,) = (setting for setting in emulation.settings if setting.name == name)
    assert (found.value, found.source) == (value, source)


def test_null_sizes_equal_default_sizes() -> None:
    """The list is SGLang's own then, as where no flag is given."""
    null, none = (emulate([*BASE, *flags], H100) for flags in (["--cuda-graph-config", NULL], []))
    assert null.asked_sizes == none.asked_sizes == ()
    assert null.settings == none.settings
    assert emulate([*BASE, "--cuda-graph-bs-decode", "8", "2"], H100).asked_sizes == (8, 2)


def test_setting_source_of_a_file_value(tmp_path: Path) -> None:
    """From the file, and from the flag that wins over it."""
    file = tmp_path / "flags.yaml"
    file.write_text("cuda-graph-bs-decode: [4, 8]\ncuda-graph-max-bs-prefill: 64\n")
    emulation = emulate([*BASE, "--cuda-graph-max-bs-prefill", "32", "--config", str(file)], H100)
    found = {setting.name: (setting.value, setting.source) for setting in emulation.settings}
    assert found[f"{PHASES}.decode.bs"] == ([4, 8], "file")
    assert found[f"{PHASES}.decode.max_bs"] == (8, "file")
    assert found[f"{PHASES}.prefill.max_bs"] == (32, "flag")


@given(seed=st.integers(0, 1 << 30))
def test_dispatch_returns_a_captured_graph_that_holds_the_batch(folder: Path, seed: int) -> None:
    """An entry is one of those captured, it holds the batch, and its padding is what is left over."""
    emulation, batches = drawn(seed, folder)
    for batch in batches:
        answer = emulation.dispatch(batch)
        assert (answer.entry is None) == (answer.reason is not None)
        entry = answer.entry
        if entry is None:
            continue
        captured = {graph.entry for graph in emulation.graphs if graph.role is batch.role}
        assert entry in captured
        assert answer.padded_tokens == entry.num_tokens - batch.num_tokens >= 0
        assert answer.padded_reqs == (0 if entry.num_reqs is None else entry.num_reqs - batch.num_reqs) >= 0
        if entry.query_len is None:
            assert entry.num_tokens <= 2 * batch.num_tokens
        else:
            assert entry.query_len == batch.uniform_query_len


@given(seed=st.integers(0, 1 << 30))
def test_dispatch_returns_the_smallest_graph(folder: Path, seed: int) -> None:
    """No smaller graph of the same runner would hold the batch."""
    emulation, batches = drawn(seed, folder)
    for batch in batches:
        entry = emulation.dispatch(batch).entry
        if entry is not None:
            smaller = [
                graph.entry
                for graph in emulation.graphs
                if graph.role is batch.role and graph.entry.query_len == entry.query_len
                if batch.num_tokens <= graph.entry.num_tokens < entry.num_tokens
            ]
            assert not smaller


@given(seed=st.integers(0, 1 << 30))
def test_graphs_are_captured_largest_first_and_once(folder: Path, seed: int) -> None:
    """A runner captures each graph once, the largest first, and a prefill runner before a decode one."""
    emulation, _ = drawn(seed, folder)
    for manager in emulation.managers:
        entries = [graph.entry for graph in manager.graphs]
        assert len(set(entries)) == len(entries)
        kinds = [entry.query_len is not None for entry in entries]
        assert kinds == sorted(kinds)
        for is_decode in (False, True):
            tokens = [e.num_tokens for e, kind in zip(entries, kinds, strict=True) if kind is is_decode]
            assert tokens == sorted(tokens, reverse=True)
        assert bool(entries) == (manager.mode is not GraphMode.NONE)


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1),
    pool=st.integers(1, 300),
    alignment=st.integers(1, 8),
    width=st.integers(1, 8),
)
def test_decode_sizes_equal_their_definition(sizes: list[int], pool: int, alignment: int, width: int) -> None:
    """A size is captured that is listed, or the pool's end, and fits the pool and the alignment."""
    found = decode_sizes(sizes, pool=pool, alignment=alignment, width=width)
    end = next(n for n in range(pool, pool + alignment) if n % alignment == 0)
    wanted = set(sizes) | ({end} if max(sizes) > end else set())
    assert found == tuple(n for n in range(1, 400) if n in wanted and n <= end and n * width % alignment == 0)


@given(sizes=st.lists(st.integers(1, 300)), most=st.integers(1, 300), alignment=st.integers(1, 8))
def test_prefill_sizes_are_multiples(sizes: list[int], most: int, alignment: int) -> None:
    """Each size that fits is there, rounded up by less than one alignment."""
    found = prefill_sizes(sizes, most=most, alignment=alignment)
    assert all(size % alignment == 0 for size in found)
    fitting = [size for size in sizes if size <= most]
    assert all(any(0 <= up - size < alignment for up in found) for size in fitting)
    assert len(found) <= len(set(fitting))


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, unique=True).map(sorted),
    ranks=st.lists(st.integers(0, 120), min_size=1),
    padding=st.booleans(),
)
def test_ranks_replay_the_size_of_the_largest_rank(sizes: list[int], ranks: list[int], padding: bool) -> None:
    """The ranks' size depends on the largest of them only, and holds each of them."""
    found = ranks_bucket(tuple(sizes), ranks, padding=padding)
    assert found == ranks_bucket(tuple(sizes), [max(ranks)], padding=padding)
    if found is None:
        assert max(ranks) not in sizes
        assert not padding or max(ranks) > sizes[-1]
    else:
        assert found == min(size for size in sizes if size >= max(ranks))


@pytest.mark.parametrize("kind", sorted(TABLE["ignored"]))
def test_ignored_flag_changes_no_graph(kind: str) -> None:
    """A flag that decides nothing about graphs is accepted, whatever its value."""
    plain = emulate(EAGLE, H100)
    for flag in TABLE["ignored"][kind]:
        found = emulate([*EAGLE, flag, *VALUES[kind]], H100)
        assert attrs.evolve(found, command=plain.command) == plain, flag


@pytest.mark.parametrize("kind", sorted(TABLE["not_emulated"]))
def test_flag_that_is_not_emulated_is_named(kind: str) -> None:
    """A flag whose effect is not emulated is refused by its name."""
    for flag in TABLE["not_emulated"][kind]:
        with pytest.raises(NotEmulated) as caught:
            emulate([*BASE, flag, *VALUES[kind]], H100)
        assert [problem.path for problem in caught.value.problems] == [(flag,)]


def test_engine_flags_equal_the_parsers() -> None:
    """The engine lists each flag that is understood, and none that is refused."""
    refused = {flag for row in TABLE["not_emulated"].values() for flag in row}
    assert {"--cuda-graph-bs-decode", "--enable-dp-attention", "--tensor-parallel-size"} <= set(ENGINE.flags)
    assert not refused & set(ENGINE.flags)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--no-such-flag"], None),
        (["--cuda-graph-max-bs", "8"], "--cuda-graph-max-bs"),
        (["--cuda-graph-bs-decode", "0"], "--cuda-graph-bs-decode"),
        (["--cuda-graph-bs-prefill", "0"], "--cuda-graph-bs-prefill"),
        (["--cuda-graph-config", '{"decode": {"bs": []}}'], "--cuda-graph-config"),
        (["--cuda-graph-config", '{"decode": {"backend": "piecewise"}}'], "--cuda-graph-config"),
        (["--tp-size", "4", "--attn-dp-size", "3"], "--attn-dp-size"),
        (["--tp-size", "0"], "--tp-size"),
        (["--dp-size", "2", "--attn-dp-size", "2", "--tp-size", "2"], "--dp-size"),
        (["--page-size", "64", "--chunked-prefill-size", "1000"], "--chunked-prefill-size"),
        (["--attention-backend", "flashmla"], "--attention-backend"),
        (["--cuda-graph-backend-prefill", "full", "--attention-backend", "triton"], "--cuda-graph-backend-prefill"),
        (["--speculative-algorithm", "DFLASH"], "--speculative-algorithm"),
        (["--speculative-algorithm", "EAGLE"], "--speculative-num-steps"),
        (["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"], "--speculative-eagle-topk"),
        (["--max-total-tokens", "1"], "--max-total-tokens"),
        (["--moe-dense-tp-size", "3"], "--moe-dense-tp-size"),
        (["--disable-cuda-graph-padding", "--enable-torch-compile"], "--disable-cuda-graph-padding"),
    ],
)
def test_bad_flags_are_refused_by_name(flags: list[str], named: str | None) -> None:
    """A refusal names the flag and says what SGLang has against it."""
    with pytest.raises(FlagError, match="SGLang") as caught:
        emulate([*BASE, *flags], H100)
    if named is not None:
        assert caught.value.problems[0].path == (named,)


def test_verification_of_another_query_length_runs_eager() -> None:
    """A batch past its prompts with as many tokens each as are drafted has a graph; another width has none."""
    emulation = emulate(EAGLE, H100)
    for width in range(1, 8):
        batch = Batch(role=Role.TARGET, num_reqs=5, num_tokens=5 * width, query_len=width)
        answer = emulation.dispatch(batch)
        assert (answer.entry is not None) == (width == 4)
        assert answer.entry is not None or answer.reason is Reason.UNCOVERED


def test_prefill_graph_is_refused_over_twice_the_tokens() -> None:
    """A graph of 256 tokens serves 128 and not 127."""
    emulation = emulate([*BASE, "--cuda-graph-bs-prefill", "256"], H100)
    answers = {
        tokens: emulation.dispatch(Batch(role=Role.TARGET, num_reqs=2, num_tokens=tokens, past_prompt=False))
        for tokens in (127, 128, 256, 257)
    }
    assert {tokens: answer.reason for tokens, answer in answers.items()} == {
        127: Reason.UNCOVERED,
        128: None,
        256: None,
        257: Reason.SIZES,
    }


def test_config_file_equals_command_line(tmp_path: Path) -> None:
    """Flags in the file of --config are taken as on the command line, which wins."""
    file = tmp_path / "flags.yaml"
    file.write_text("cuda-graph-bs-decode: [1, 4, 9]\ntp-size: 4\ndisable-cuda-graph-padding: true\n")
    by_file = emulate([*BASE, "--config", str(file), "--tp-size", "2"], H100)
    plain = ["--cuda-graph-bs-decode", "1", "4", "9", "--tp-size", "2", "--disable-cuda-graph-padding"]
    by_line = emulate([*BASE, *plain], H100)
    assert by_file.graphs == by_line.graphs
    sources = {setting.name: setting.source for setting in by_file.settings}
    assert (sources["tp_size"], sources["disable_cuda_graph_padding"]) == ("flag", "file")


@pytest.mark.parametrize(
    "text", ["enable-dp-attention: true\n", "lora-paths: [a]\n", "- a\n", "{", "no-such-flag: 1\n"]
)
def test_bad_config_file_is_refused(tmp_path: Path, text: str) -> None:
    """A file that SGLang does not take is refused."""
    file = tmp_path / "flags.yaml"
    file.write_text(text)
    with pytest.raises(FlagError):
        emulate([*BASE, "--config", str(file)], H100)


def test_unambiguous_abbreviation_of_a_flag_is_accepted() -> None:
    """A beginning of one name only stands for it, as in SGLang's parser."""
    short = emulate([*BASE, "--cuda-graph-max-bs-d", "24"], H100)
    assert short.graphs == emulate([*BASE, "--cuda-graph-max-bs-decode", "24"], H100).graphs
    assert short.sizes[-1] == 24


def test_dispatch_refuses_a_role_without_a_runner() -> None:
    """Without a drafter there is no draft role to ask about."""
    with pytest.raises(DispatchError, match="draft_decode"):
        emulate(BASE, H100).dispatch(Batch(role=Role.DRAFT_DECODE, num_reqs=1, num_tokens=1, query_len=1))
