"""A plan and its explanation as one self-contained HTML page."""

from rlinf.plan_page.page import render

__all__ = ["render"]
