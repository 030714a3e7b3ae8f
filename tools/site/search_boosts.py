"""Ranks of pages in the search: answers come before pages that list things, link to others or give reasons."""

from __future__ import annotations

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


def search_boost(uri: str) -> float:
    """Returns the factor of a page, such as `decisions/001-turns-hold-leases.md`."""
    return next((boost for pattern, boost in BOOSTS.items() if fnmatch(uri, pattern)), 1)
