"""The model folder of a run: the user's, or a small new one with a tokenizer of single characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinf.config.reasoning import ArchitectureConfig
from rlinf.errors import UserError

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"


def character_tokenizer(alphabet: str) -> Any:
    """Returns a `PreTrainedTokenizerFast` with one token per character, which decodes to exactly the encoded text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, END, UNKNOWN, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, padding_side="left"
    )


def load_checkpoint_tokenizer(folder: Path, key: str = "model.path") -> Any:
    """Checks that transformers supports the architecture of a model folder, and returns its tokenizer.

    Raises: UserError.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from rlinf_workers.models import load_tokenizer, reads_pictures

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        tokenizer = load_tokenizer(str(folder))
    except Exception as error:
        raise UserError(
            f"{key}={folder}: transformers cannot load it: {type(error).__name__}: {error}",
            hint="is the folder a whole download of a model?",
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not reads_pictures(folder):
        raise UserError(
            f"{key}={folder}: model_type={config.model_type!r} is not a causal language model, nor a vision-language "
            "model that is supported, with its preprocessor_config.json",
            hint="give a model that generates text, Qwen2 or Qwen2.5-VL for example",
        )
    _check_vocabulary(folder, key, tokenizer, config)
    return tokenizer


def _check_vocabulary(folder: Path, key: str, tokenizer: Any, config: Any) -> None:
    """Checks that every token has an embedding; otherwise a run fails later, or a GPU reads invalid memory."""
    num_rows = config.get_text_config().vocab_size
    token, largest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if largest >= num_rows:
        raise UserError(
            f"{key}={folder}: the tokenizer gives {token!r} the id {largest}, but the model's embedding has "
            f"{num_rows} rows (vocab_size of config.json)",
            hint="put the tokenizer that belongs to the model into the folder, or resize the embedding to it",
        )


def max_positions(folder: Path) -> int | None:
    """Returns a model's maximum sequence length (prompt and completion); None if its config does not define one."""
    from transformers import AutoConfig

    return getattr(
        AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True).get_text_config(),
        "max_position_embeddings",
        None,
    )


def write_model_folder(folder: Path, architecture: ArchitectureConfig, alphabet: str, dtype: str) -> None:
    """Writes config.json and tokenizer of a small model; each worker draws its weights from the run's seed."""
    from transformers import Qwen2Config

    tokenizer = character_tokenizer(alphabet)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        num_key_value_heads=architecture.num_kv_heads,
        max_position_embeddings=architecture.max_positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
