"""Strongly connected components against brute force: the reachability matrix."""

import sys

import numpy as np
from hypothesis import given, strategies as st

from rlinf_sched.components import strongly_connected_components


@st.composite
def graphs(draw):
    n = draw(st.integers(1, 9))
    edges = draw(st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=25))
    return [sorted(v for u, v in edges if u == node) for node in range(n)]


def reachability(successors):
    n = len(successors)
    reach = np.eye(n, dtype=bool)
    for u, targets in enumerate(successors):
        reach[u, targets] = True
    for _ in range(n):
        reach = reach @ reach
    return reach


@given(graphs())
def test_components_are_the_classes_of_mutual_reachability(successors):
    reach = reachability(successors)
    together = reach & reach.T
    expected = {tuple(np.flatnonzero(row)) for row in together}
    components = strongly_connected_components(successors)
    assert {tuple(component) for component in components} == expected
    assert sorted(node for component in components for node in component) == list(range(len(successors)))


@given(graphs())
def test_order_is_topological_and_takes_the_lowest_ready_component_first(successors):
    reach = reachability(successors)
    components = strongly_connected_components(successors)
    place = {node: i for i, component in enumerate(components) for node in component}
    assert all(place[u] <= place[v] for u, targets in enumerate(successors) for v in targets)
    for i, component in enumerate(components):
        waiting = [c for c in components[i:] if not any(reach[o[0], c[0]] for o in components[i:] if o is not c)]
        assert component[0] == min(c[0] for c in waiting)


def test_a_chain_longer_than_the_recursion_limit_is_no_trouble():
    n = sys.getrecursionlimit() * 2
    assert len(strongly_connected_components([[i + 1] for i in range(n - 1)] + [[]])) == n
    assert len(strongly_connected_components([[(i + 1) % n] for i in range(n)])) == 1


def test_without_edges_the_order_is_the_order_of_declaration():
    assert strongly_connected_components([[], [], []]) == [[0], [1], [2]]
    assert strongly_connected_components([]) == []
