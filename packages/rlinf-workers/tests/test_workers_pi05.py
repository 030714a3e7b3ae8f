"""pi0.5's prompts, options and checkpoints in openpi's format; what it computes is tested in test_workers_pi_plain."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from workers_plain_pi import plain_predict

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.policies.pi0.processor import byte_ids, prepare_pictures
from rlinf_workers.policies.pi05.policy import Pi05
from rlinf_workers.policies.pi05.prompts import StatePrompts, state_bins
from rlinf_workers.records.embodied import text_tensor
from rlinf_workers.testing.policies import check_policy, random_fields

pytest.importorskip("transformers", minversion="5.17")

FIELDS = {
    "state": FieldSpec(shape=(3,), dtype="float32"),
    "image.front": FieldSpec(shape=(28, 28, 3), dtype="uint8"),
    "instruction": FieldSpec(shape=(), dtype="text"),
}
BOUNDS = torch.ones(2)
ACTIONS = ActionSpec(kind="continuous", shape=(2,), low=-BOUNDS, high=BOUNDS)
SMALL = {"chunk_size": 2, "width": 32, "num_layers": 1, "image_size": 28, "value_width": 8}


@pytest.mark.parametrize("value", ["expert", "vision-language"])
@pytest.mark.parametrize("noise", ["flow-sde", "flow-noise"])
def test_pi05_conforms(noise, value):
    check_policy(Pi05, FIELDS, ACTIONS, noise=noise, value=value, **SMALL)


def test_pi05_conforms_without_the_state_in_its_prompt():
    check_policy(Pi05, FIELDS, ACTIONS, state_in_prompt=False, trains="expert", **SMALL)
    policy, shown = Pi05(FIELDS, ACTIONS, state_in_prompt=False, **SMALL), random_fields(FIELDS, 2)
    with torch.no_grad():
        first = policy.act(shown, None)
        assert torch.equal(policy.act(shown | {"state": shown["state"] + 1}, None).values, first.values)


# -- prompts -------------------------------------------------------------------------------------------------------


def test_bins_are_numpys_digits():
    drawn = torch.randn(200, 7, generator=torch.Generator().manual_seed(0))
    edges = torch.tensor([[-1.0, -1.0001, 1.0, 0.0, 0.9999, 3.0, -2.0]])
    state = torch.cat([drawn, edges])
    expected = np.digitize(state.numpy(), bins=np.linspace(-1, 1, 257)[:-1]) - 1
    assert state_bins(state).tolist() == expected.tolist()


def test_a_prompt_says_the_state_and_is_never_cut():
    prompts = StatePrompts(byte_ids, 60, 2)
    ids, mask = prompts(text_tensor(["open_drawer", "push"]), torch.tensor([[-1.0, 0.0], [0.99, -3.0]]))
    texts = [bytes(row[1 : int(num)].tolist()).decode() for row, num in zip(ids, mask.sum(1), strict=True)]
    assert texts == ["Task: open drawer, State: 0 128;\nAction: ", "Task: push, State: 254 -1;\nAction: "]
    assert ids[:, 0].tolist() == [256, 256] and ids.shape == (2, 1 + len(texts[0]))
    prompts.check("x" * 27)
    with pytest.raises(PolicyError, match=r"'x+' makes a prompt of 61 tokens, and max_prompt_tokens=60"):
        prompts.check("x" * 28)
    with pytest.raises(PolicyError, match="makes a prompt of 61 tokens"):
        prompts(text_tensor(["x" * 28]), torch.full((1, 2), 0.99))


# -- checkpoints ---------------------------------------------------------------------------------------------------

PALIGEMMA, EXPERT = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
VISION = PALIGEMMA + "model.vision_tower.vision_model."
TEXT = PALIGEMMA + "model.language_model."
LAYERS, HEAD, NUM_TOKENS = 2, 16, 30
STATISTICS = {"q01": [-1.0] * 4, "q99": [3.0] * 4, "mean": [0.0] * 4, "std": [1.0] * 4}
WORDS = ["<pad>", "<bos>", "<unk>", "Task:", "push,", "State:", ";\nAction:", *map(str, range(10))]


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Names as openpi's conversion to PyTorch writes them; PaliGemma 32 wide, SigLIP 64 with 16 heads, the expert
    48."""
    shapes: dict[str, tuple[int, ...]] = {
        VISION + "embeddings.patch_embedding.weight": (64, 3, 14, 14),
        VISION + "embeddings.patch_embedding.bias": (64,),
        VISION + "embeddings.position_embedding.weight": (4, 64),
        VISION + "post_layernorm.weight": (64,),
        VISION + "post_layernorm.bias": (64,),
        PALIGEMMA + "model.multi_modal_projector.linear.weight": (32, 64),
        PALIGEMMA + "model.multi_modal_projector.linear.bias": (32,),
        PALIGEMMA + "lm_head.weight": (NUM_TOKENS, 32),
        TEXT + "norm.weight": (32,),
        EXPERT + "lm_head.weight": (NUM_TOKENS, 48),
        EXPERT + "model.norm.dense.weight": (144, 48),
        EXPERT + "model.norm.dense.bias": (144,),
        "action_in_proj.weight": (48, 4),
        "action_in_proj.bias": (48,),
        "action_out_proj.weight": (4, 48),
        "action_out_proj.bias": (4,),
    }
    for name in ("time_mlp_in", "time_mlp_out"):
        shapes |= {f"{name}.weight": (48, 48), f"{name}.bias": (48,)}
    for i in range(LAYERS):
        b = f"{VISION}encoder.layers.{i}."
        shapes |= {f"{b}{n}.{part}": (64,) for n in ("layer_norm1", "layer_norm2") for part in ("weight", "bias")}
        for layer in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= {f"{b}self_attn.{layer}.weight": (64, 64), f"{b}self_attn.{layer}.bias": (64,)}
        shapes |= {f"{b}mlp.fc1.weight": (96, 64), f"{b}mlp.fc1.bias": (96,)}
        shapes |= {f"{b}mlp.fc2.weight": (64, 96), f"{b}mlp.fc2.bias": (64,)}
        for prefix, width, hidden in ((TEXT, 32, 40), (EXPERT + "model.", 48, 56)):
            b = f"{prefix}layers.{i}."
            shapes |= {
                f"{b}self_attn.q_proj.weight": (2 * HEAD, width),
                f"{b}self_attn.o_proj.weight": (width, 2 * HEAD),
            }
            shapes |= {f"{b}self_attn.{n}_proj.weight": (HEAD, width) for n in "kv"}
            shapes |= {f"{b}mlp.{n}_proj.weight": (hidden, width) for n in ("gate", "up")}
            shapes |= {f"{b}mlp.down_proj.weight": (width, hidden)}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                if prefix == TEXT:
                    shapes |= {f"{b}{norm}.weight": (width,)}
                else:
                    shapes |= {f"{b}{norm}.dense.weight": (144, 48), f"{b}{norm}.dense.bias": (144,)}
    return shapes


def published_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, shape in published_shapes().items():
        drawn = torch.randn(shape, generator=generator)
        made[name] = 0.1 * drawn if len(shape) == 1 else drawn / torch.tensor(shape[1:]).prod() ** 0.5
        if "norm" in name and name.startswith(VISION) and name.endswith("weight"):
            made[name] += 1
    return made


def write_checkpoint(folder, tensors: dict[str, Tensor], config: dict) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "removed")  # type: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", pad_token="<pad>").save_pretrained(folder)
    (folder / "assets" / "lab").mkdir(parents=True)
    statistics = {"norm_stats": {"state": STATISTICS, "actions": STATISTICS}}
    (folder / "assets" / "lab" / "norm_stats.json").write_text(json.dumps(statistics))


@pytest.fixture(scope="module", params=["openpi", "lerobot"])
def folder(tmp_path_factory, request):
    made, tensors = tmp_path_factory.mktemp(request.param), published_tensors()
    config = {"action_dim": 4, "action_horizon": 3, "paligemma_variant": "gemma_2b", "precision": "bfloat16"}
    if request.param == "lerobot":  # as its policy saves itself
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        config = {"type": "pi05", "chunk_size": 3, "max_action_dim": 4, "max_state_dim": 32}
    write_checkpoint(made, tensors, config)
    return made


def test_a_checkpoint_acts_as_its_tensors_say(folder):
    options: dict[str, Any] = {"folder": str(folder), "dataset": "lab", "chunk_size": 2, "num_denoising_steps": 1}
    assert Pi05.needs(FIELDS, ACTIONS, **options).chunk_size == 2
    policy, shown = Pi05(FIELDS, ACTIONS, **options), random_fields(FIELDS, 2)
    shown["instruction"] = text_tensor(["push", "push"])
    shown["state"] = torch.tensor([[-1.0, 1.0, 3.0], [-1.0, 0.0, 2.0]])  # -1, 0, 1 and -1, -0.5, 0.5
    renamed = {
        PALIGEMMA + "lm_head": "model.vlm.language_model.embed_tokens",
        VISION: "model.vlm.vision_tower.",
        PALIGEMMA + "model.": "model.vlm.",
        EXPERT + "model.": "model.dit.",
    }
    tensors = {}
    for name, tensor in published_tensors().items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    prompts = [[1, 3, 4, 5, 7, 2, 2]] * 2  # "128" and "255;\nAction:" are unknown words
    pictures = [prepare_pictures(shown["image.front"], 28)]
    start = policy.evaluation_start(shown["state"])
    assert start.shape == (2, 3, 4)
    expected = start - plain_predict(tensors, pictures, prompts, None, 16)(start, 1.0)[1]
    words = policy._prompts(shown["instruction"], policy.normalize_state(shown["state"]))[0].tolist()
    assert words == prompts
    with torch.no_grad():
        found = policy.act(shown, None).actions
    scaled = expected[:, :2, :2] * 2 + 1  # quantiles -1 and 3
    torch.testing.assert_close(found, scaled, rtol=1e-5, atol=4e-5)  # of noise of about 3, twice
    assert not any(p.requires_grad for p in policy.model.model.vlm.parameters())


def test_a_checkpoint_conforms(folder):
    options: dict[str, Any] = {"folder": str(folder), "dataset": "lab", "chunk_size": 2, "num_denoising_steps": 2}
    check_policy(Pi05, FIELDS, ACTIONS, **options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"time_mlp_in.weight": None, "state_proj.weight": torch.zeros(2)}, "it has pi0's state_proj, so use .* pi0"),
        ({"action_in_proj.bias": None}, "lacks action_in_proj.bias"),
        ({"proprio_proj.weight": torch.zeros(2)}, "has other tensors than pi0.5: proprio_proj.weight"),
        ({"time_mlp_out.weight": torch.zeros(2, 2)}, "has in another shape time_mlp_out.weight"),
    ],
)
def test_files_of_another_model_are_refused(tmp_path, change, says):
    tensors = {name: tensor for name, tensor in (published_tensors() | change).items() if tensor is not None}
    write_checkpoint(tmp_path, tensors, {"action_horizon": 3})
    with pytest.raises(PolicyError, match=says):
        Pi05.needs(FIELDS, ACTIONS, folder=str(tmp_path), dataset="lab", chunk_size=2)


@pytest.mark.parametrize(
    ("config", "options", "says"),
    [
        ({"type": "pi0"}, {}, "is of type 'pi0'; this policy loads 'pi05'"),
        ({}, {}, "says neither chunk_size nor action_horizon"),
        ({"action_horizon": 3}, {"chunk_size": 4}, "has chunk_size=3; here are 4 actions"),
        ({"action_horizon": 3}, {"dataset": "home"}, "of lab; name one of them"),
        ({"action_horizon": 3}, {"max_prompt_tokens": 6}, "a state of 3 numbers makes a prompt of up to"),
    ],
)
def test_refusals_before_any_process_starts(tmp_path, config, options, says):
    write_checkpoint(tmp_path, published_tensors(), config)
    given = {"folder": str(tmp_path), "dataset": "lab", "chunk_size": 2} | options
    with pytest.raises(PolicyError, match=says):
        Pi05.needs(FIELDS, ACTIONS, **given)


def test_a_folder_without_anything_is_refused(tmp_path):
    with pytest.raises(PolicyError, match=r"has no config\.json; give a checkpoint of openpi's or LeRobot's"):
        Pi05.needs(FIELDS, ACTIONS, folder=str(tmp_path), dataset="lab")
