"""What packages state as their public API is there. Python reads no stub by itself, so only this sees a wrong line."""

import importlib
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # Python 3.11

SETTINGS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]
FACES = next(contract for contract in SETTINGS["contracts"] if contract["type"] == "faces")["public_modules"]


@pytest.mark.parametrize("name", [*SETTINGS["root_packages"], *FACES])
def test_every_name_of_a_face_can_be_imported(name: str):
    module = importlib.import_module(name)
    for member in getattr(module, "__all__", ()):
        getattr(module, member)
