"""The folder of a run: writes and reads its files."""

from rlinf.run_folder.folder import RunFolder
from rlinf.run_folder.rows import read_rows
from rlinf.run_folder.trace import TraceEvent, read_events

__all__ = ["RunFolder", "TraceEvent", "read_rows", "read_events"]
