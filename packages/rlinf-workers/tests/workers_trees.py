"""Trees of tokens, drawn and written by hand."""

from hypothesis import strategies as st

from rlinf_workers.agents.records import AgentTrajectory, Sampled, TokenNode


def written(author, tokens, parent):
    return TokenNode(parent=parent, author=author, token_ids=list(tokens))


def turn(tokens, parent, *, versions=None, truncated=False, **options):
    sampled = Sampled(
        token_ids=list(tokens),
        logprobs=[-0.1 * token for token in tokens],
        versions=versions or [(len(tokens), 5)],
        truncated=truncated,
    )
    return TokenNode(parent=parent, author="policy", token_ids=list(tokens), sampled=sampled, **options)


FEW_TOKENS = st.integers(3, 6)


@st.composite
def trees(draw, *, max_nodes=9, max_tokens=3, tokens=FEW_TOKENS):
    """An episode whose task is the tokens [1, 4]."""
    nodes = [written("user", [1, 4], -1)]
    for _ in range(draw(st.integers(1, max_nodes))):
        parent = draw(st.integers(0, len(nodes) - 1))
        token_ids = draw(st.lists(tokens, min_size=1, max_size=max_tokens))
        author = draw(st.sampled_from(["policy", "policy", "tool", "template"]))
        nodes.append(turn(token_ids, parent) if author == "policy" else written(author, token_ids, parent))
    return AgentTrajectory(nodes=nodes, reward=1.0)
