"""The tool `search` with embeddings: its order by another computation, and what is refused."""

import asyncio
import json
import re

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from rlinf_workers.agents.tools import EpisodeTools, ToolUnavailable, make_tools, start_tools

model2vec = pytest.importorskip("model2vec")

VECTORS = {"[UNK]": (0.0, 0.0), "car": (1.0, 0.1), "auto": (0.9, 0.2), "tree": (0.0, 1.0), "red": (0.5, 0.5)}


@pytest.fixture
def folder(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VECTORS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = np.array(list(VECTORS.values()), dtype=np.float32)
    model2vec.StaticModel(vectors, tokenizer, config={}).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def search(tmp_path, folder, texts, query, top_k):
    """The names of the documents that the query finds."""
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"id": str(index), "text": text} for index, text in enumerate(texts)]
    corpus.write_text("\n".join(json.dumps(row) for row in rows))

    async def main():
        tools = make_tools([{"tool": "search", "path": str(corpus), "embeddings": str(folder), "top_k": top_k}])
        await start_tools(tools)
        return await EpisodeTools(tools, "e").call("search", {"query": query})

    text = asyncio.run(main()).text
    return [line.split()[1] for line in text.splitlines() if re.match(r"\[\d+\] ", line)]


def test_documents_come_in_the_order_of_their_cosine_with_the_query(tmp_path, folder):
    texts = ["tree tree", "car red", "auto", "car", "red tree", "auto"]

    def mean(text):
        vector = np.mean([VECTORS[word] for word in text.split()], axis=0)
        return vector / np.linalg.norm(vector)

    scores = [float(mean(text) @ mean("auto car")) for text in texts]
    expected = sorted(range(len(texts)), key=lambda index: (-round(scores[index], 6), index))
    assert search(tmp_path, folder, texts, "auto car", 4) == [str(index) for index in expected[:4]]


def test_a_long_document_counts_to_its_end(tmp_path, folder):
    assert search(tmp_path, folder, ["red", "car " * 600 + "tree " * 5000], "tree", 1) == ["1"]


@pytest.mark.parametrize(("name", "problem"), [("nothing", "are no folder"), ("", "cannot be loaded")])
def test_a_folder_without_a_model_is_refused(tmp_path, name, problem):
    with pytest.raises(ToolUnavailable, match=problem):
        search(tmp_path, tmp_path / name, ["car"], "car", 1)
