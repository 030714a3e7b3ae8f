"""Imports torch in a way that an interrupt cannot cut short.

A notebook lives on after its cell is interrupted, and torch cannot be imported a second time after an import that was
cut: the second one raises, or ends the process.
"""

import contextlib
import importlib
import threading


def import_torch() -> None:
    """Imports torch in a thread, which a KeyboardInterrupt in this one does not stop; later imports wait for it.

    Raises: ImportError, KeyboardInterrupt.
    """
    thread = threading.Thread(target=_import, name="import torch", daemon=True)
    thread.start()
    thread.join()
    importlib.import_module("torch")


def _import() -> None:
    with contextlib.suppress(ImportError, OSError):  # the thread that waits raises it again
        importlib.import_module("torch")
