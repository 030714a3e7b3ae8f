"""Folders of tiny vision-language models: config, a tokenizer of single characters and an image processor."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen3VLConfig, Qwen3VLMoeConfig, SmolVLMConfig
from workers_harnesses import drawing

from rlinf_workers.agents.pictures import PICTURE_URL, part_of_url
from rlinf_workers.models.language_model import ModelSettings, load_tokenizer
from rlinf_workers.models.picture_files import PictureFile
from rlinf_workers.models.picture_processor import PictureProcessor
from rlinf_workers.roles.picture_pool import PicturePool
from rlinf_workers.roles.records.language import Prompt

QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
SMOL = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<video>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def tiny_folder(folder: Path, family: str) -> str:
    """Writes config, tokenizer of single characters and processor of a small model."""
    special = ["<pad>", "<end>", "<unk>", *(SMOL if family == "smolvlm" else QWEN)]
    vocabulary = {token: index for index, token in enumerate([*special, *"abc=?0123456789\n "])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    whole: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=special[3:],
    )
    whole.save_pretrained(folder)
    text: dict[str, Any] = {**TEXT, "vocab_size": len(vocabulary), "bos_token_id": None, "eos_token_id": 1}
    if family == "smolvlm":
        text |= {"model_type": "llama", "pad_token_id": 0}
        tower = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
        config: Any = SmolVLMConfig(
            text_config=text,
            vision_config={**tower, "patch_size": 8, "image_size": 32},
            scale_factor=2,
            image_token_id=vocabulary["<image>"],
        )
        pictures = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": True}
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 4}))
    else:
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        tower = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "patch_size": 8}
        tower |= {"out_hidden_size": 32}
        if family == "qwen2_5_vl":
            tower |= {"window_size": 32, "fullatt_block_indexes": [1]}
        else:
            tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        config = {"qwen2_5_vl": Qwen2_5_VLConfig, "qwen3_vl": Qwen3VLConfig, "qwen3_vl_moe": Qwen3VLMoeConfig}[family](
            text_config=text,
            vision_config=tower,
            image_token_id=vocabulary["<|image_pad|>"],
            video_token_id=vocabulary["<|video_pad|>"],
            vision_start_token_id=vocabulary["<|vision_start|>"],
            vision_end_token_id=vocabulary["<|vision_end|>"],
        )
        pictures = {"patch_size": 8, "merge_size": 2, "min_pixels": 256, "max_pixels": 64 * 64}
    config.save_pretrained(folder)
    kind = "SmolVLMImageProcessor" if family == "smolvlm" else "Qwen2VLImageProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind, **pictures}))
    return str(folder)


def random_weights(folder: str) -> ModelSettings:
    """A model with random weights in a folder of `tiny_folder`."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return ModelSettings(folder=folder, has_weights=True)


def seeing_prompts(folder: str, pool: PicturePool, texts: Sequence[str]) -> list[Prompt]:
    """Prompts with a picture each, as a driver makes them."""
    processor = PictureProcessor(folder, load_tokenizer(folder))
    prompts = []
    for index, text in enumerate(texts):
        token_ids, pictures = processor.encode(
            f"{processor.picture_text}{text}", [PictureFile(drawing(10 * index + 5))]
        )
        assert pictures is not None
        (picture,) = pictures.pictures
        content = [part_of_url(PICTURE_URL + picture.digest), {"type": "text", "text": text}]
        prompts.append(
            Prompt(
                index=index,
                token_ids=torch.tensor(token_ids),
                reference_answer="",
                text=text,
                messages_json=json.dumps([{"role": "user", "content": content}]),
                pictures=pool.place_all(pictures),
            )
        )
    return prompts
