"""Ranks of pages in the search: answers come before pages that list things, link to others or give reasons, and
sections without text are left out."""

from __future__ import annotations

import re
from fnmatch import fnmatch

BOOSTS = {
    "how-do-i.md": 3,
    "metrics.md": 3,
    "architecture.md": 0.5,
    "training-step.md": 0.5,
    "index.md": 0.2,
    "research-log.md": 0.3,
    "reference/recipes/*": 0.3,
    "reference/api/*": 0.3,
    "reference/keys-embodied.md": 0.9,
    "files/*": 0.2,
    "decisions/*": 0.1,
}
"""Factors of a page's score, by pattern of its source file."""
_EMPTY_SECTION = re.compile(r"<(h[2-5])( id=[^>]*)(?=>(?:(?!</h).)*</\1>\s*<h[3-6])", re.DOTALL)


def search_boost(uri: str) -> float:
    """Returns the factor of a page, such as `decisions/001-turns-hold-leases.md`."""
    return next((boost for pattern, boost in BOOSTS.items() if fnmatch(uri, pattern)), 1)


def without_empty_sections(content: str) -> str:
    """Excludes from the search each heading of a page that another heading follows at once."""
    return _EMPTY_SECTION.sub(r'<\1 data-search-exclude="true"\2', content)
