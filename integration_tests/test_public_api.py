"""What packages state as their public API is there. Python reads no stub by itself, so only this sees a wrong line."""

import importlib
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # Python 3.11

SETTINGS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]
PUBLIC_MODULES = next(contract for contract in SETTINGS["contracts"] if contract["type"] == "public_api")[
    "public_modules"
]


@pytest.mark.parametrize("name", [*SETTINGS["root_packages"], *PUBLIC_MODULES])
def test_every_public_name_can_be_imported(name: str):
    module = importlib.import_module(name)
    for member in getattr(module, "__all__", ()):
        getattr(module, member)
