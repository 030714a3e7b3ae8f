"""Runs in a venv's interpreter: tests imports and prints the results and installed versions as one line of JSON.

It imports nothing of rlinf itself, so that it works in a venv in which rlinf is broken.

    python probe.py MODULE...
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import sys
import warnings


def main() -> None:
    sys.path.pop(0)  # the folder of this file, whose modules must not be importable
    failures = {}
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sys.argv[1:]:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - any exception of a module is reported
                failures[name] = f"{type(error).__name__}: {error}"
    versions = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions() if dist.metadata}
    torch = sys.modules.get("torch")
    cuda = torch.version.cuda if torch is not None else None
    python = ".".join(map(str, sys.version_info[:3]))
    print(json.dumps({"python": python, "failures": failures, "versions": versions, "cuda": cuda}))


if __name__ == "__main__":
    main()
