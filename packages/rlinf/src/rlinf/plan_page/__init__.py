"""A plan and its explanation as one HTML page that needs nothing else."""

from rlinf.plan_page.page import render

__all__ = ["render"]
