"""An index of documents by static embeddings: a text is the mean of the vectors of its tokens.

The package model2vec was chosen since it needs numpy and tokenizers alone; an agent process imports no torch. Its
models are folders that anyone can distil from a sentence transformer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_workers.agents.tools.base import ToolUnavailable
from rlinf_workers.agents.tools.corpus import Document, best

if TYPE_CHECKING:
    import numpy as np


class EmbeddingIndex:
    """Documents in memory, with a vector each. Equal scores are ordered as the documents are.

    Args:
        folder: a model of model2vec.

    Raises: ToolUnavailable: model2vec is not installed, or the folder has no such model.
    """

    def __init__(self, documents: list[Document], folder: str) -> None:
        try:
            from model2vec import StaticModel
        except ImportError as error:
            needed = "pip install 'rlinf-workers[agents-embeddings]'"
            raise ToolUnavailable(f"search with embeddings needs model2vec: {needed} ({error})") from error
        if not Path(folder).is_dir():  # a name would be looked up on the Hub
            raise ToolUnavailable(f"the embeddings {folder} are no folder")
        try:
            self._model = StaticModel.from_pretrained(folder)
        except Exception as error:  # its loader raises whatever a file makes it raise
            raise ToolUnavailable(f"the embeddings {folder} cannot be loaded: {error}") from error
        self._documents = documents
        self._vectors = self._encode([f"{document.title} {document.text}" for document in documents])

    def search(self, query: str, top_k: int) -> list[Document]:
        """The `top_k` documents with the highest cosine similarity to the query, the best first."""
        return [self._documents[index] for index in best(self._vectors @ self._encode([query])[0], top_k)]

    def _encode(self, texts: list[str]) -> np.ndarray:
        """[len(texts), dimensions], of length 1, or 0 for a text without a known token."""
        return self._model.encode(texts, max_length=None, normalize=True, use_multiprocessing=False)
