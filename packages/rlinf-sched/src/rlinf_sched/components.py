"""Strongly connected components of a small directed graph, in a reproducible topological order.

Source: R. Tarjan, "Depth-first search and linear graph algorithms", SIAM J. Comput. 1(2), 1972. Departs from it in two
ways: the walk keeps its own stack (no recursion limit), and the components are put in the topological order that takes
the lowest-numbered ready component first, so that the order follows the order of declaration wherever the edges allow.
"""

import heapq
from collections.abc import Collection, Sequence


def strongly_connected_components(successors: Sequence[Collection[int]]) -> list[list[int]]:
    """Components of the graph in which node `u` points at each of `successors[u]`.

    Returns the components in topological order (every edge leads to the same or a later component), each with its
    nodes ascending. Among components that could come next, the one with the smallest node comes first.
    """
    return _topological(successors, _tarjan(successors))


def _tarjan(successors: Sequence[Collection[int]]) -> list[list[int]]:
    num_nodes = len(successors)
    order = [-1] * num_nodes  # when the walk met the node; -1: not yet
    low = [0] * num_nodes  # the earliest node still open that this subtree can reach
    is_open = [False] * num_nodes
    open_nodes: list[int] = []
    components: list[list[int]] = []
    num_met = 0
    for root in range(num_nodes):
        if order[root] >= 0:
            continue
        walk = [(root, iter(successors[root]))]
        while walk:
            node, rest = walk[-1]
            if order[node] < 0:
                order[node] = low[node] = num_met
                num_met += 1
                open_nodes.append(node)
                is_open[node] = True
            for successor in rest:
                if order[successor] < 0:
                    walk.append((successor, iter(successors[successor])))
                    break
                if is_open[successor]:
                    low[node] = min(low[node], order[successor])
            else:
                walk.pop()
                if walk:
                    parent = walk[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == order[node]:
                    components.append(_close(node, open_nodes, is_open))
    return components


def _close(root: int, open_nodes: list[int], is_open: list[bool]) -> list[int]:
    """Takes the finished component of `root` off the stack of open nodes."""
    component = []
    while True:
        node = open_nodes.pop()
        is_open[node] = False
        component.append(node)
        if node == root:
            return sorted(component)


def _topological(successors: Sequence[Collection[int]], components: list[list[int]]) -> list[list[int]]:
    component_of = {node: i for i, component in enumerate(components) for node in component}
    edges = {(component_of[u], component_of[v]) for u in range(len(successors)) for v in successors[u]}
    edges = {(u, v) for u, v in edges if u != v}
    num_waiting = [0] * len(components)
    for _, v in edges:
        num_waiting[v] += 1
    ready = [(component[0], i) for i, component in enumerate(components) if num_waiting[i] == 0]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, u = heapq.heappop(ready)
        ordered.append(components[u])
        for source, v in edges:
            if source == u:
                num_waiting[v] -= 1
                if num_waiting[v] == 0:
                    heapq.heappush(ready, (components[v][0], v))
    assert len(ordered) == len(components), "the condensation of a graph has no cycle"
    return ordered
