"""torch's cache of compiled programs is where no other user can put any."""

import os
import stat

import pytest

from rlinf_workers.compiled_code import VARIABLE, keep_compiled_code_private


def test_programs_that_torch_compiles_are_kept_where_nobody_else_writes(tmp_path, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    keep_compiled_code_private()
    assert cache_dir() == str(tmp_path / "rlinf" / "torchinductor")
    assert stat.S_IMODE(os.stat(cache_dir()).st_mode) == 0o700
    monkeypatch.setenv(VARIABLE, "/elsewhere")
    keep_compiled_code_private()
    assert os.environ[VARIABLE] == "/elsewhere"


@pytest.mark.parametrize("cache", ["no folder", "another user's"])
def test_without_a_cache_of_its_own_it_is_a_fresh_temporary_folder(tmp_path, monkeypatch, cache):
    if cache == "no folder":
        (tmp_path / cache).touch()
    else:
        monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    keep_compiled_code_private()
    (folder,) = tmp_path.glob("rlinf-compiled-*")
    assert os.environ[VARIABLE] == str(folder) and stat.S_IMODE(folder.stat().st_mode) == 0o700
