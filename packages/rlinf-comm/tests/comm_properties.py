"""Properties that hypothesis tries on a few examples by default, and on many in a slow test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def holds_for(*values: SearchStrategy, num: int, num_slow: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """@holds_for(st.integers(), num=30, num_slow=300) makes a function of `values` a test, and a longer slow one."""

    def test_of(check: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("num_examples", [num, pytest.param(num_slow, marks=pytest.mark.slow)])
        def test(num_examples: int) -> None:
            settings(max_examples=num_examples)(given(*values)(check))()

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return test_of
