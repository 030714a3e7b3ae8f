"""The report of a run: its folder as one HTML page that needs nothing else."""

from rlinf.report.page import write_report

__all__ = ["write_report"]
