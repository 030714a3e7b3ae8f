"""Stop strings are found where decoding each prefix of a completion finds them, whatever the tokenizer."""

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlinf_workers.engines.stopping import StopStrings


def byte_tokenizer():
    """Each byte is a token, as in byte-level BPE without merges, and a few words are."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    words = ["ab", "abc", "cab", "aab"]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate([*letters, *words])}, []))
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    return tokenizer


def spaced_tokenizer():
    """Its decoder drops the space before the first token, as Llama's does."""
    words = ["\u2581a", "\u2581b", "a", "b", "ab", "\u2581", "c"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="c"))
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=inner)


TOKENIZERS = {"bytes": byte_tokenizer(), "spaces": spaced_tokenizer()}


def by_prefixes(tokenizer, stops, token_ids):
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if any(stop in text for stop in stops):
            return end
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(
    choices=st.lists(st.integers(0, 7), min_size=1, max_size=30),
    stops=st.lists(st.text("ab c\u00e9", min_size=1, max_size=4), min_size=1, max_size=3),
    begun=st.integers(0, 30),
)
def test_a_completion_ends_where_a_prefix_first_says_a_stop_string(name, choices, stops, begun):
    tokenizer = TOKENIZERS[name]
    vocabulary = tokenizer.get_vocab()
    if name == "bytes":
        few = [vocabulary[token] for token in ("a", "b", "c", "\u0120", "\u00c3", "\u00a9", "ab", "<end>")]
    else:
        few = sorted(vocabulary.values())
    token_ids = [few[choice % len(few)] for choice in choices]
    stop_strings = StopStrings(tokenizer, stops)
    expected = by_prefixes(tokenizer, stops, token_ids)
    assert stop_strings.end(token_ids) == expected
    if expected is None or expected > begun:  # the first tokens were looked at before
        assert stop_strings.end(token_ids, begun=begun) == expected


def test_the_rest_of_the_token_that_completes_it_belongs_to_the_completion():
    tokenizer = TOKENIZERS["bytes"]
    words = [tokenizer.get_vocab()[word] for word in ("c", "abc", "b")]
    assert StopStrings(tokenizer, ["ca"]).end(words) == 2


def test_a_special_token_is_text():
    tokenizer = TOKENIZERS["bytes"]
    token_ids = [tokenizer.get_vocab()[token] for token in ("a", "<end>", "b")]
    assert StopStrings(tokenizer, ["<end>"]).end(token_ids) == 2
