"""Names of parts: looked up without importing anything."""

import sys

import pytest

from rlinf_algos.errors import AlgosError
from rlinf_algos.registry import Registry


def test_locating_a_name_imports_nothing(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "of_mine").mkdir()
    (tmp_path / "of_mine" / "losses.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    registry = Registry("policy loss", {"clip": "package_that_is_not_there:f"})
    registry.locate("of_mine.losses:mine")
    assert "of_mine" not in sys.modules
    with pytest.raises(AlgosError, match="the policy loss 'of_mnie:f' cannot be imported: No module named 'of_mnie'"):
        registry.locate("of_mnie:f")
    with pytest.raises(AlgosError, match="no policy loss is called 'klip'; did you mean 'clip'"):
        registry.locate("klip")
