"""The tool `search` over a local corpus: BM25 (as Lucene scores it, k1 1.5, b 0.75), by the package bm25s, or by
embeddings (embeddings.py).

bm25s was chosen since it needs numpy alone and is maintained; rank-bm25 has had no release since 2022, and tantivy is a
whole search engine.
Words are runs of letters and digits in lower case; each Chinese, Japanese or Korean character is a word. Equal scores
are ordered as the documents are, so results do not depend on anything but the corpus and the query.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlinf_workers.agents.tools.base import ToolFailed, ToolResult, ToolSpec, ToolUnavailable
from rlinf_workers.agents.tools.corpus import Document, best, missing, read_documents
from rlinf_workers.agents.tools.embeddings import EmbeddingIndex
from rlinf_workers.agents.tools.limits import check_limits, cut
from rlinf_workers.plugins import OptionError, Spec

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|(?:(?![{_IDEOGRAPHS}])\w)+")
MAX_QUERY_WORDS = 256
NOTHING = "No document has a word of the query."


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """The tool's options."""

    path: str
    """A .jsonl or .parquet file, or a folder of such files and of .txt and .md files; see corpus.py."""
    embeddings: str | None = None
    """A folder with a model of model2vec, whose embeddings compare documents with the query; null: BM25."""
    top_k: int = 3
    """Number of documents that a search returns."""
    passage_characters: int | None = None
    """Split longer documents into passages of at most this length, each of which can be found; null: do not."""
    max_characters: int = 8000
    """Length of a result. Each document gets an equal share of it and is cut in the middle."""
    max_bytes: int = 1 << 30
    """Limit of the corpus's text. It is in memory, with an index of about the same size."""
    time_limit_s: float = 60.0
    """Deadline of a search in seconds."""
    name: str = "search"
    """What the policy calls it."""
    description: str = "Searches a collection of documents and returns those that fit the query best."
    """What the policy reads about it."""

    def __post_init__(self) -> None:
        check_limits(self.time_limit_s, self.max_characters)
        if self.top_k < 1:
            raise OptionError("top_k", f"={self.top_k!r} must be at least 1")
        if self.max_characters < 200 * self.top_k:
            raise OptionError(
                "max_characters", f"={self.max_characters!r} must be at least 200 for each of top_k={self.top_k}"
            )
        if self.passage_characters is not None and self.passage_characters < 100:
            raise OptionError("passage_characters", f"={self.passage_characters!r} must be at least 100")


class SearchSpec(Spec):
    """Also checks that there is a corpus, before a run starts."""

    def problems(self, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        yield from super().problems(options)
        path = options.get("path")
        if isinstance(path, str) and not Path(path).exists():
            yield "path", f"={path}: {missing(path)}"


SPEC = SearchSpec(name="search", implementation="rlinf_workers.agents.tools.search:SearchTool", options=SearchOptions)


class DocumentIndex(Protocol):
    """Finds documents."""

    def search(self, query: str, top_k: int) -> list[Document]:
        """At most `top_k` documents, the best first."""
        ...


class SearchTool:
    """An index of a corpus that all episodes share; see the module's docstring."""

    keeps_state = False

    def __init__(self, options: SearchOptions) -> None:
        self._options = options
        self.time_limit_s: float | None = options.time_limit_s
        self.max_characters = options.max_characters
        query = {"type": "string", "description": "the words to search for"}
        self.specs = (
            ToolSpec(
                name=options.name,
                description=options.description,
                parameters={
                    "type": "object",
                    "properties": {"query": query},
                    "required": ["query"],
                    "additionalProperties": False,
                },
            ),
        )
        self._index: DocumentIndex | None = None

    async def start(self) -> None:
        """Reads the corpus. Raises: ToolUnavailable: it is missing, wrong or too large, or bm25s is not installed."""
        if self._index is None:
            self._index = await asyncio.to_thread(self._read)

    def open(self, episode: str) -> SearchTool:
        """All episodes share the index."""
        return self

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Raises: ToolFailed: the query has no word."""
        if self._index is None:
            raise ToolUnavailable("the corpus has not been read")
        query = arguments["query"]
        if not words(query):
            raise ToolFailed("The query has no words.")
        documents = await asyncio.to_thread(self._index.search, query, self._options.top_k)
        share = self.max_characters // self._options.top_k - 2
        texts = [cut(f"[{i}] {_heading(one)}\n{one.text}", share) for i, one in enumerate(documents, start=1)]
        return ToolResult(text="\n\n".join(texts) or NOTHING)

    async def close(self) -> None:
        """Keeps the index: the tool may be shared by several episodes that close it as their session."""

    def _read(self) -> DocumentIndex:
        options = self._options
        documents = read_documents(
            options.path, passage_characters=options.passage_characters, max_bytes=options.max_bytes
        )
        return Bm25Index(documents) if options.embeddings is None else EmbeddingIndex(documents, options.embeddings)


class Bm25Index:
    """An index of documents in memory."""

    def __init__(self, documents: list[Document]) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise ToolUnavailable(f"search needs bm25s: pip install 'rlinf-workers[agents]' ({error})") from error
        logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets DEBUG
        self._documents = documents
        self._numbers: dict[str, int] = {}
        rows = [
            [self._numbers.setdefault(word, len(self._numbers)) for word in words(f"{document.title} {document.text}")]
            for document in documents
        ]
        if not self._numbers:
            raise ToolUnavailable("the corpus has no words")
        self._scores = bm25s.BM25(backend="numpy")
        self._scores.index((rows, dict(self._numbers)), create_empty_token=False, show_progress=False)

    def search(self, query: str, top_k: int) -> list[Document]:
        """At most `top_k` documents with a word of the query, the best first."""
        numbers = [self._numbers[word] for word in words(query)[:MAX_QUERY_WORDS] if word in self._numbers]
        if not numbers:
            return []
        scores = self._scores.get_scores_from_ids(numbers)
        return [self._documents[index] for index in best(scores, top_k) if scores[index] > 0]


def words(text: str) -> list[str]:
    """The words that are counted."""
    return _WORD.findall(text.lower())


def _heading(document: Document) -> str:
    return f"{document.title} ({document.name})" if document.title not in ("", document.name) else document.name
