"""The model folder of a run: the user's, or a small new one with a tokenizer of single characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlinf.config.reasoning import ArchitectureConfig, VisionTowerConfig
from rlinf.errors import UserError

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"


PICTURE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
"""Special tokens of Qwen's vision-language models."""
MOST_PIXELS = 1 << 20
"""Of a picture that a small new model reads."""


def character_tokenizer(alphabet: str, *, reads_pictures: bool = False) -> Any:
    """Returns a `PreTrainedTokenizerFast` with one token per character, which decodes to exactly the encoded text.

    Args:
        reads_pictures: whether it has the special tokens of pictures, too.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = PICTURE_TOKENS if reads_pictures else ()
    vocabulary = {token: index for index, token in enumerate([PAD, END, UNKNOWN, *alphabet, *special])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    further: dict[str, Any] = {"additional_special_tokens": list(special)} if special else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, padding_side="left", **further
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
    """Writes config.json, tokenizer and image processor of a small model; each worker draws its weights from the run's
    seed."""
    tower = architecture.vision_tower
    tokenizer = character_tokenizer(alphabet, reads_pictures=tower is not None)
    of_text = {
        "vocab_size": len(tokenizer),
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.intermediate_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads,
        "max_position_embeddings": architecture.max_positions,
        "initializer_range": architecture.initializer_range,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if tower is None:
        from transformers import Qwen2Config

        config: Any = Qwen2Config(**of_text, tie_word_embeddings=False, dtype=dtype)
    else:
        config = _vision_language_config(architecture, of_text, tower, tokenizer, dtype)
        picture = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": tower.patch_size,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "min_pixels": tower.token_pixels**2,
            "max_pixels": MOST_PIXELS,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "preprocessor_config.json").write_text(json.dumps(picture, indent=2), encoding="utf-8")
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _vision_language_config(
    architecture: ArchitectureConfig, of_text: dict[str, Any], tower: VisionTowerConfig, tokenizer: Any, dtype: str
) -> Any:
    """A `Qwen2_5_VLConfig`, whose tower attends to the whole picture in every layer; windows suit large pictures."""
    from transformers import Qwen2_5_VLConfig

    half = architecture.hidden_size // architecture.num_heads // 2
    side = half * 3 // 8  # the share of rows and of columns in Qwen2.5-VL
    start, picture, end, video = (tokenizer.convert_tokens_to_ids(token) for token in PICTURE_TOKENS)
    return Qwen2_5_VLConfig(
        text_config={
            **of_text,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [half - 2 * side, side, side],
            },
        },
        vision_config={
            "depth": tower.num_layers,
            "hidden_size": tower.hidden_size,
            "intermediate_size": tower.intermediate_size,
            "num_heads": tower.num_heads,
            "patch_size": tower.patch_size,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": architecture.hidden_size,
            "initializer_range": architecture.initializer_range,
            "window_size": 4 * tower.token_pixels,
            "fullatt_block_indexes": list(range(tower.num_layers)),
        },
        image_token_id=picture,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        dtype=dtype,
    )
