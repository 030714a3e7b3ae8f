"""The tool `search`: its scores by another computation, its corpora, and what is refused by file and line."""

import asyncio
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rlinf_workers.agents.tools import EpisodeTools, ToolResult, ToolUnavailable, make_tools, start_tools
from rlinf_workers.agents.tools.corpus import Document, passages, read_documents
from rlinf_workers.agents.tools.search import NOTHING, Bm25Index, words
from rlinf_workers.plugins import OptionError

pytest.importorskip("bm25s")


def search(path: Path, *queries: str, **options: Any) -> list[ToolResult]:
    async def main() -> list[ToolResult]:
        tools = make_tools([{"tool": "search", "path": str(path), **options}])
        await start_tools(tools)
        episode = EpisodeTools(tools, "e")
        return [await episode.call(options.get("name", "search"), {"query": query}) for query in queries]

    return asyncio.run(main())


def rows_in(folder: Path, *rows: Any) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def bm25(texts: list[str], query: str) -> list[float]:
    """Lucene's BM25 with k1 1.5 and b 0.75, by its formula in float64."""
    counts = [Counter(words(text)) for text in texts]
    lengths = [sum(count.values()) for count in counts]
    mean = sum(lengths) / len(lengths)
    scores = []
    for count, length in zip(counts, lengths, strict=True):
        score = 0.0
        for word in words(query):
            num_with = sum(word in other for other in counts)
            weight = math.log(1 + (len(texts) - num_with + 0.5) / (num_with + 0.5))
            score += weight * count[word] / (count[word] + 1.5 * (1 - 0.75 + 0.75 * length / mean))
        scores.append(score)
    return scores


WORDS = st.lists(st.sampled_from(["red", "Blue", "green", "two", "7", "\u5c71", "caf\u00e9"]), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=12), WORDS, st.integers(1, 5))
def test_the_best_documents_by_another_computation(rows, query, top_k):
    texts = [" ".join(row) for row in rows]
    index = Bm25Index([Document(str(i), "", text) for i, text in enumerate(texts)])
    scores = bm25(texts, " ".join(query))
    results = index.search(" ".join(query), top_k)
    assert len(results) == min(top_k, sum(score > 0 for score in scores))
    chosen = [int(document.name) for document in results]
    best = sorted(scores, reverse=True)[: len(chosen)]
    np.testing.assert_allclose([scores[i] for i in chosen], best, rtol=1e-5)


def test_equal_scores_are_in_the_order_of_the_documents():
    texts = ["the same text", "the same text with more words"] * 100
    index = Bm25Index([Document(str(i), "", text) for i, text in enumerate(texts)])
    order = [*range(0, 200, 2), *range(1, 200, 2)]  # the shorter text scores higher
    for top_k in (4, 150, 500):
        assert [int(document.name) for document in index.search("same", top_k)] == order[:top_k]


def test_results_have_titles_and_names(tmp_path):
    path = rows_in(
        tmp_path,
        {"id": 7, "title": "Alps", "text": "The Alps are mountains."},
        {"_id": "n1", "contents": "Mountains of the north."},
        "",
        {"title": "Sea", "text": "Water."},
    )
    found_two, by_title, none = search(path, "mountains", "SEA", "desert")
    assert found_two.text == "[1] n1\nMountains of the north.\n\n[2] Alps (7)\nThe Alps are mountains."
    assert by_title.text == "[1] Sea (corpus.jsonl:4)\nWater."
    assert (none.text, none.failure) == (NOTHING, "")


def test_a_query_without_words_is_the_policys(tmp_path):
    path = rows_in(tmp_path, {"text": "a"})
    results = search(path, "?!", "", "a" * 100_000 + " b" * 100_000)
    assert [result.failure for result in results] == ["policy", "policy", ""]
    assert results[0].text == "The query has no words."


def test_a_folder_of_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "note.md").write_text("# Heading\nA green note.")
    (tmp_path / "a.txt").write_text("A green text.")
    (tmp_path / "image.png").write_bytes(b"\xff\xfe")
    rows_in(tmp_path, {"text": "A green row."})
    documents = read_documents(str(tmp_path), passage_characters=None, max_bytes=1000)
    assert [document.name for document in documents] == ["a.txt", "b/note.md", "corpus.jsonl:1"]
    assert search(tmp_path, "green text", top_k=1)[0].text == "[1] a.txt\nA green text."


def test_parquet_files(tmp_path):
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    path = tmp_path / "corpus.parquet"
    pandas.DataFrame({"id": ["x", None], "text": ["A red row.", "A blue row."]}).to_parquet(path)
    assert search(path, "blue")[0].text == "[1] corpus.parquet:2\nA blue row."
    pandas.DataFrame({"text": ["A red row.", None]}).to_parquet(path)
    with pytest.raises(ToolUnavailable, match=r"corpus.parquet, row 2: a row needs a text"):
        search(path, "red")
    path.write_bytes(b"no parquet")
    with pytest.raises(ToolUnavailable, match=r"corpus.parquet cannot be read"):
        search(path, "red")


def test_long_documents_are_cut_or_split(tmp_path):
    text = "alpha " * 200 + "\n" + "beta " * 200
    path = rows_in(tmp_path, {"id": "long", "text": text}, {"id": "other", "text": "alpha beta"})
    result = search(path, "alpha", max_characters=600, top_k=2)[0]
    assert len(result.text) <= 600
    assert result.text.startswith("[1] long\nalpha alpha") and "left out" in result.text
    assert result.text.endswith("beta \n\n[2] other\nalpha beta")
    split = search(path, "beta", passage_characters=1300, top_k=1)[0]
    assert "left out" not in split.text and split.text.startswith("[1] long\nbeta")  # the passage alone
    assert [len(piece) for piece in passages(text, 1300)] == [1199, 1000]


@given(st.text(alphabet="ab \n", max_size=60), st.integers(1, 12))
def test_passages_have_all_words_and_a_maximum_length(text, length):
    pieces = passages(text, length)
    assert all(len(piece) <= length for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (['{"text": "a"}', '{"text": '], "corpus.jsonl:2: not a line of JSON"),
        (["[1]"], "corpus.jsonl:1: a row must be an object, not list"),
        (['{"text": "a"}', "", '{"body": "a"}'], "corpus.jsonl:3: a row needs a text .* has only the keys ['body']"),
        (['{"text": 3}'], "corpus.jsonl:1: a row needs a text .* has the text 3"),
        (['{"text": "a", "title": 3}'], "corpus.jsonl:1: the title 3 is no text"),
        (['{"text": "..."}'], "the corpus has no words"),
        ([""], "has no documents; it may have files of .txt"),
        (['{"text": "' + "a" * 2000 + '"}'], "has more than 1500 bytes; raise max_bytes"),
    ],
)
def test_a_wrong_corpus_is_refused_by_its_place(tmp_path, rows, problem):
    with pytest.raises(ToolUnavailable) as error:
        search(rows_in(tmp_path, *rows), "a", max_bytes=1500)
    begin, _, end = problem.partition(" .* ")
    assert begin in str(error.value) and end in str(error.value)


def test_a_missing_corpus_is_refused(tmp_path):
    with pytest.raises(ToolUnavailable, match="absent cannot be read: there is no such file or folder in "):
        search(tmp_path / "absent", "a")
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(ToolUnavailable, match=r"x.csv cannot be read: it is none of \.txt, \.md"):
        search(tmp_path / "x.csv", "a")
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ToolUnavailable, match=r"x.txt is not UTF-8"):
        search(tmp_path, "a")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "missing required field `path`"),
        ({"path": "x", "top_k": 0}, "top_k=0 must be at least 1"),
        ({"path": "x", "top_k": 50}, "must be at least 200 for each of top_k=50"),
        ({"path": "x", "passage_characters": 5}, "passage_characters=5 must be at least 100"),
    ],
)
def test_options_are_checked(options, problem):
    with pytest.raises(OptionError) as error:
        make_tools([{"tool": "search", **options}])
    assert problem in str(error.value)


def test_several_corpora_have_names_of_their_own(tmp_path):
    result = search(rows_in(tmp_path, {"text": "a"}), "a", name="look_up", description="Old texts.")
    assert result[0].text == "[1] corpus.jsonl:1\na"
