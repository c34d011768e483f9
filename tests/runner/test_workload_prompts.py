"""Requests of prompts: text through a tokenizer, and files that hold none."""

import contextlib
import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import InvalidDocument, InvalidValue, RunError
from capture_planner_runner.serving.workload import from_prompts

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for the file that a test writes anew for each example."""
    return tmp_path_factory.mktemp("workload")


WORDS = ["<eos>", "<unk>", "alpha", "beta", "gamma", "delta"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Make a folder with a tokenizer of a few words; its eos where asked for."""

    def make(config):
        folder = tmp_path_factory.mktemp("tokenizer")
        vocabulary = {word: index for index, word in enumerate(WORDS)}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        made.add_special_tokens(WORDS[:2])
        made.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"} | config
        (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
        return folder

    return make


@pytest.fixture(scope="module")
def words(tokenizer):
    """The folder of a tokenizer with an eos."""
    return tokenizer({"eos_token": "<eos>"})


SENTENCES = st.lists(st.lists(st.sampled_from(WORDS[2:]), min_size=1, max_size=5).map(" ".join), min_size=1, max_size=4)


@given(SENTENCES, st.sampled_from(["\n", "\r\n", "\n\n", "\n  \n"]), st.sampled_from(["", "\ufeff"]))
def test_prompts_survive_their_tokens(folder, words, sentences, end, mark):
    """Text to tokens to text is the identity, line by line."""
    path = folder / "prompts.txt"
    path.write_bytes((mark + end.join(sentences)).encode())
    requests, decode = from_prompts(path, words, max_new_tokens=4)
    assert [decode(request.prompt) for request in requests] == sentences
    step = 1 if end.count("\n") == 1 else 2
    assert [request.name for request in requests] == [
        f"prompts.txt:{1 + step * index}" for index in range(len(sentences))
    ]
    assert {(r.arrival, r.max_new_tokens, r.stop) for r in requests} == {(0.0, 4, frozenset({0}))}
    assert decode((*requests[0].prompt, 0)) == sentences[0]


@given(SENTENCES, st.data())
def test_lines_of_json_say_more(folder, words, sentences, data):
    """An arrival and an output length of their own, either left out or not."""
    objects = []
    for sentence in sentences:
        options = {"max_new_tokens": st.integers(1, 1 << 20), "arrival": st.floats(0, 1 << 20) | st.integers(0, 9)}
        chosen = data.draw(st.fixed_dictionaries({}, optional=options))
        objects.append({"prompt": sentence} | chosen)
    path = folder / "prompts.JSONL"
    path.write_text("\n\n".join(json.dumps(item) for item in objects), "utf-8")
    requests, decode = from_prompts(path, words, max_new_tokens=3)
    objects.sort(key=lambda item: item.get("arrival", 0.0))
    assert [
        {"prompt": decode(r.prompt), "max_new_tokens": r.max_new_tokens, "arrival": r.arrival} for r in requests
    ] == [{"max_new_tokens": 3, "arrival": 0.0} | item for item in objects]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "a"', "2:15: not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"prompt": ' + "9" * 5000 + "}", "not JSON"),
        ("3", "expected an object with prompt, max_new_tokens, arrival"),
        ("{}", "prompt: is missing"),
        ('{"prompt": 3}', "prompt: expected text"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ('{"prompt": "a", "prompt": "b"}', "prompt: is given twice"),
        ('{"prompt": "a", "stop": 3}', "stop: unknown key"),
        ('{"prompt": "a", "arrival": NaN}', "arrival: expected seconds"),
        ('{"prompt": "a", "arrival": -1}', "arrival: expected seconds"),
        ('{"prompt": "a", "arrival": true}', "arrival: expected seconds"),
        ('{"prompt": "a", "arrival": 1' + "0" * 400 + "}", "arrival: expected seconds"),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens: expected a whole number from 1"),
        ('{"prompt": "a", "max_new_tokens": 2.0}', "max_new_tokens: expected a whole number from 1"),
        ('{"prompt": "a", "max_new_tokens": null}', "max_new_tokens: expected a whole number from 1"),
    ],
)
def test_every_wrong_line_of_prompts_is_named(folder, line, says):
    """With its file, line and key, before any tokenizer is looked for."""
    path = folder / "prompts.jsonl"
    path.write_text(f'{{"prompt": "alpha"}}\n{line}\n\n{line}', "utf-8")
    with pytest.raises(InvalidDocument) as caught:
        from_prompts(path, folder / "nowhere", max_new_tokens=3)
    assert [problem.line for problem in caught.value.problems] == [2, 4]
    assert str(caught.value.problems[0]).startswith(f"{path}:2:")
    assert re.search(says, str(caught.value.problems[0]))


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_file_without_prompts(folder, name):
    """Blank lines are none, and a file has to be there."""
    (folder / name).write_text("\n \r\n", "utf-8")
    with pytest.raises(InvalidDocument, match="no prompts; write one on each line"):
        from_prompts(folder / name, folder, max_new_tokens=3)
    with pytest.raises(InvalidDocument, match="cannot be read"):
        from_prompts(folder / "absent" / name, folder, max_new_tokens=3)
    with pytest.raises(InvalidValue, match="max_new_tokens: expected 1 to 1048576, got 0"):
        from_prompts(folder / name, folder, max_new_tokens=0)


def test_problems_of_prompts_have_an_end(folder):
    """A hundred of them say enough."""
    (folder / "many.jsonl").write_text("{\n" * 500, "utf-8")
    with pytest.raises(InvalidDocument) as caught:
        from_prompts(folder / "many.jsonl", folder, max_new_tokens=3)
    assert len(caught.value.problems) == 100


@st.composite
def mutated(draw, contents):
    """Bytes with a few of them replaced, left out or put in."""
    content = bytearray(draw(contents))
    pieces = st.sampled_from([b'"', b",", b"\n", b"\r", b"-", b"\0", b"\xff", b"{", b"}", b"NaN", b"1e999", b"9" * 20])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        content[at : at + draw(st.integers(0, 3))] = draw(pieces | st.binary(max_size=2))
    return bytes(content)


OBJECTS = SENTENCES.map(lambda each: "\n".join(json.dumps({"prompt": s, "arrival": 1.5}) for s in each).encode())


@given(mutated(OBJECTS) | st.binary(max_size=40), st.sampled_from(["jsonl", "txt"]))
def test_mutated_prompts_are_read_or_refused(folder, words, content, suffix):
    """Whatever is in the file."""
    path = folder / f"mutated.{suffix}"
    path.write_bytes(content)
    with contextlib.suppress(InvalidDocument):
        assert from_prompts(path, words, max_new_tokens=3)[0]


def test_a_tokenizer_without_an_end_stops_nothing(folder, tokenizer):
    """Then the length alone ends a request."""
    (folder / "one.txt").write_text("alpha beta", "utf-8")
    (request,), _ = from_prompts(folder / "one.txt", tokenizer({}), max_new_tokens=3)
    assert (request.prompt, request.stop) == ((2, 3), frozenset())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": 3}', None])
def test_a_folder_without_a_tokenizer(folder, tokenizer, content):
    """Or with one that cannot be read is an error of the run, which names the folder."""
    (folder / "one.txt").write_text("alpha", "utf-8")
    broken = tokenizer({})
    if content is None:
        for file in broken.iterdir():
            file.unlink()
    else:
        (broken / "tokenizer.json").write_bytes(content)
    with pytest.raises(RunError, match="holds no tokenizer that transformers can read") as caught:
        from_prompts(folder / "one.txt", broken, max_new_tokens=3)
    assert str(caught.value).startswith(str(broken))


def test_a_name_on_the_hub_is_not_a_folder(folder, monkeypatch):
    """Nothing is downloaded; and without transformers there are no prompts."""
    (folder / "one.txt").write_text("alpha", "utf-8")
    with pytest.raises(RunError, match="no such folder"):
        from_prompts(folder / "one.txt", "gpt2", max_new_tokens=3)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RunError, match="install it"):
        from_prompts(folder / "one.txt", folder, max_new_tokens=3)
