"""Where the metrics of a run go beside its folder: one file for each log writer, `spec.py` names them all."""

from rlinf.log_writers.base import EVALUATION, LoggedRun, LogWriter, SampleRows, side_by_side
from rlinf.log_writers.spec import LogWriterSpec, Uploads

__all__ = ["LogWriter", "LoggedRun", "SampleRows", "EVALUATION", "side_by_side", "LogWriterSpec", "Uploads"]
