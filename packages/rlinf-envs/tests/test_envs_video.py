"""What films need."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from rlinf_envs import EnvError, write_grid


def test_missing_imageio_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("imageio"):
            raise ImportError(f"No module named {name!r}")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EnvError, match=r"pip install 'rlinf-envs\[video\]'"):
        write_grid(tmp_path / "film.mp4", [])
