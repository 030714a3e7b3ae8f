"""OpenVLA against a plain implementation, on small checkpoints of the published format."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from workers_plain_openvla import (
    LAYERS,
    NUM_TOKENS,
    plain_logits,
    prompt_ids,
    published_tensors,
    write_checkpoint,
)
from workers_rounding import additions_of_transformer, rounding_bound

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.errors import WeightFilesError
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.policies.openvla.actions import ActionStatistics, action_table, actions_of, bins_of
from rlinf_workers.policies.openvla.pixels import resized
from rlinf_workers.policies.openvla.policy import OpenVLA
from rlinf_workers.roles.records.embodied import text_tensor
from rlinf_workers.testing.policies import check_policy, check_published, random_fields

FIELDS = {
    "image.front": FieldSpec(shape=(21, 21, 3), dtype="uint8"),
    "instruction": FieldSpec(shape=(), dtype="text"),
}
ACTIONS = ActionSpec(kind="continuous", shape=(3,), low=-torch.ones(3), high=torch.tensor([1.0, 2.0, 3.0]))
HAND = ActionSpec(kind="continuous", shape=(3,), low=-torch.ones(3), high=torch.ones(3))
"""Ends with a gripper, as simulators have it."""
SIZES = {"image_size": 28, "vision_width": 16, "width": 32}
TEXTS = ["push the cube", "reach", "Push THE cube"]
BLOCKS = (2, 1)
"""Of the checkpoint's towers, less the last one of each."""
ROUNDING = rounding_bound(
    additions_of_transformer(num_layers=2, width=48, inner_width=144, num_tokens=14)  # the towers
    + 80 + 320 + 24  # the projector
    + additions_of_transformer(num_layers=LAYERS, width=24, inner_width=40, num_tokens=20)
)  # fmt: skip
"""Of log-probabilities and actions of order 1, in float32."""


@pytest.fixture(scope="module")
def tensors():
    return published_tensors()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tensors):
    checkpoint = tmp_path_factory.mktemp("openvla")
    write_checkpoint(checkpoint, tensors)
    return checkpoint


def _policy(folder: Path, **options) -> OpenVLA:
    return OpenVLA(FIELDS, ACTIONS, folder=str(folder), unnorm_key="bridge_orig", **options)


def _fields(texts=TEXTS):
    return random_fields({"image.front": FIELDS["image.front"]}, len(texts)) | {"instruction": text_tensor(texts)}


def test_a_small_policy_conforms():
    fields = FIELDS | {"image.front": FieldSpec(shape=(20, 30, 3), dtype="uint8")}
    check_policy(OpenVLA, fields, ACTIONS, **SIZES, temperature=1.3)


def test_a_checkpoint_conforms(folder):
    check_policy(OpenVLA, FIELDS, ACTIONS, folder=str(folder), unnorm_key="bridge_orig")


def _plain_logprobs(tensors, fields, texts, bins, temperature):
    rows = []
    for picture, text, row in zip(fields["image.front"], texts, bins.tolist(), strict=True):
        ids = [*prompt_ids(text.lower()), *(NUM_TOKENS - 1 - b for b in row[:-1])]
        logits = plain_logits(tensors, picture, ids, BLOCKS)[-len(row) :, NUM_TOKENS - 256 : NUM_TOKENS]
        logprobs = (logits / temperature).log_softmax(-1).flip(-1)
        rows.append(logprobs[torch.arange(len(row)), row][None])
    return torch.stack(rows)


def test_logprobs_and_gradients_are_those_of_a_plain_implementation(folder, tensors):
    policy, fields = _policy(folder, temperature=1.5), _fields()
    answer = policy.act(fields, torch.randn(3, policy.noise_size, generator=torch.Generator().manual_seed(0)))
    bins = bins_of(policy.table, answer.actions[:, 0])
    exact = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    expected = _plain_logprobs(exact, fields, TEXTS, bins, 1.5)
    torch.testing.assert_close(answer.logprobs.double(), expected.detach(), rtol=0, atol=ROUNDING)
    at_one = -_plain_logprobs(exact, fields, TEXTS, bins, 1.0).flatten(1).sum(1)  # whatever the temperature of acting
    losses = policy.imitate(fields, answer.actions, torch.zeros(0)).double()
    torch.testing.assert_close(losses, at_one.detach(), rtol=0, atol=3 * ROUNDING)  # the sum of three
    in_float32 = policy.evaluate(fields, answer.actions, {}).logprobs.double()
    torch.testing.assert_close(in_float32, expected, rtol=0, atol=ROUNDING)
    policy.double()  # in float32 gradients of these magnitudes are rounded by more than is asked of them
    policy.evaluate(fields, answer.actions, {}).logprobs.sum().backward()
    expected.sum().backward()
    largest = max(float(tensor.grad.abs().max()) for tensor in exact.values() if tensor.grad is not None)
    for name, parameter in policy.named_parameters():
        if not name.startswith("value_head."):
            expected_grad = exact[name].grad
            assert expected_grad is not None and parameter.grad is not None, name
            # norms and angles are in float32 whatever the model is in
            torch.testing.assert_close(parameter.grad, expected_grad, rtol=0, atol=ROUNDING * largest)


def test_the_likeliest_actions_are_those_of_a_plain_implementation(folder, tensors):
    """Token after token, the whole sequence anew each time; unnormalised with the statistics of the dataset."""
    policy, fields = _policy(folder), _fields()
    expected = []
    for picture, text in zip(fields["image.front"], TEXTS, strict=True):
        ids, numbers = prompt_ids(text.lower()), []
        for low, high, scaled in ((-0.5, 0.5, True), (0.0, 2.0, True), (0.25, 0.25, False)):
            logits = plain_logits(tensors, picture, ids, BLOCKS)[-1, NUM_TOKENS - 256 : NUM_TOKENS]
            ids.append(NUM_TOKENS - 256 + int(logits.argmax()))
            edges = np.linspace(-1, 1, 256)
            number = ((edges[:-1] + edges[1:]) / 2)[min(NUM_TOKENS - ids[-1] - 1, 254)]
            numbers.append(0.5 * (number + 1) * (high - low + 1e-8) + low if scaled else number)
        expected.append(numbers)
    actions = policy.act(fields, None).actions[:, 0]
    torch.testing.assert_close(actions.double(), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_entropies_are_those_of_an_enumeration(folder):
    """Of an action of one number: all its tokens have probability 1, and the mean of -log p is the entropy."""
    one = ActionSpec(kind="continuous", shape=(1,), low=torch.zeros(1), high=torch.ones(1))
    policy = OpenVLA(FIELDS, one, folder=str(folder), unnorm_key="kuka")
    fields = _fields(["reach"] * 256)
    fields["image.front"] = fields["image.front"][:1].expand(256, -1, -1, -1)
    with torch.no_grad():
        outputs = policy.evaluate(fields, actions_of(policy.table, torch.arange(256)[:, None])[:, None], {})
    assert float(outputs.logprobs.exp().sum()) == pytest.approx(1, abs=1e-5)
    assert float(outputs.entropies[0]) == pytest.approx(
        -float((outputs.logprobs.exp() * outputs.logprobs).sum()), abs=1e-4
    )


def test_instructions_of_other_lengths_share_a_batch(folder):
    policy, fields = _policy(folder), _fields(["reach", "push the red cube over there", "reach"])
    noise = torch.randn(3, policy.noise_size)
    answer = policy.act(fields, noise)
    for row in range(3):
        alone = policy.act({name: values[row : row + 1] for name, values in fields.items()}, noise[row : row + 1])
        assert torch.equal(alone.actions, answer.actions[row : row + 1])
        torch.testing.assert_close(alone.logprobs, answer.logprobs[row : row + 1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(alone.values, answer.values[row : row + 1], rtol=1e-5, atol=1e-5)


def test_pictures_and_instructions_count(folder):
    policy, fields = _policy(folder), _fields(["reach"])
    value = policy.act(fields, None).values
    assert not torch.equal(policy.act(fields | {"image.front": 255 - fields["image.front"]}, None).values, value)
    assert not torch.equal(policy.act(fields | {"instruction": text_tensor(["push"])}, None).values, value)


def test_the_value_knows_no_action(folder):
    policy, fields = _policy(folder), _fields()
    answers = [policy.act(fields, torch.randn(3, policy.noise_size)) for _ in range(2)]
    assert not torch.equal(answers[0].actions, answers[1].actions)
    assert torch.equal(answers[0].values, answers[1].values)


def test_resizing_is_pillows():
    image = pytest.importorskip("PIL.Image")
    for shape in ((64, 64), (30, 30), (30, 100)):
        picture = torch.randint(256, (*shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        expected = np.asarray(image.fromarray(picture.numpy()).resize((42, 42), image.Resampling.BICUBIC))
        actual = (resized(picture[None], 42)[0] * 255).round().movedim(0, -1).numpy()
        assert np.abs(actual - expected).max() <= 1
        assert np.abs(actual - expected).mean() < 0.05


def test_every_action_says_its_bins():
    """Also where two tokens mean one number, and where a dimension hardly moves."""
    statistics = ActionStatistics(low=[-0.5, 0.0, 1.0, 0.0], high=[0.5, 0.0, 1.0, 0.0], mask=[True, True, True, False])
    table = action_table(statistics, 256)
    bins = torch.arange(256)[:, None].expand(-1, 4)
    assert torch.equal(bins_of(table, actions_of(table, bins)), bins)
    torch.testing.assert_close(table[2], torch.ones(256), rtol=4e-5, atol=0)
    assert float(table[0, 255] - table[0, 254]) == pytest.approx(0, abs=1e-7)
    between = (table[:, 7] + 0.4 * (table[:, 8] - table[:, 7]))[None]
    assert bins_of(table, between)[0, [0, 3]].tolist() == [7, 7]


@pytest.mark.parametrize(
    ("fields", "actions", "options", "says"),
    [
        ({"instruction": FIELDS["instruction"]}, ACTIONS, {}, "the environment provides instruction"),
        ({"image.front": FIELDS["image.front"]}, ACTIONS, {}, "reads an 'instruction'"),
        (FIELDS | {"image.wrist": FIELDS["image.front"]}, ACTIONS, {}, "choose them with options.camera from"),
        (FIELDS, ACTIONS, {"camera": "top"}, "no camera top; the environment has front"),
        (FIELDS, ACTIONS, {"depth": 2}, "there is no option 'depth'"),
        (FIELDS, ACTIONS, {"num_heads": 5}, "options.width has to be a multiple of options.num_heads"),
        (FIELDS, ACTIONS, {"temperature": 0.0}, "temperature has to be above 0"),
        (FIELDS, ACTIONS, {"dtype": "int8"}, "use one of float32, bfloat16"),
        (FIELDS, ACTIONS, {"unnorm_key": "kuka"}, "set options.folder"),
        (FIELDS, ActionSpec(kind="discrete", shape=(), low=torch.tensor(0), high=torch.tensor(3)), {}, "discrete ones"),
        (
            FIELDS,
            ActionSpec(kind="continuous", shape=(1,), low=-torch.ones(1), high=torch.tensor([torch.inf])),
            {},
            "have no bounds",
        ),
    ],
)
def test_what_it_cannot_use_is_refused(fields, actions, options, says):
    with pytest.raises(PolicyError, match=says):
        OpenVLA.needs(fields, actions, **options)


@pytest.mark.parametrize("gripper", ["open_is_minus_one", "open_is_one"])
def test_a_gripper_moves_as_the_environment_has_it(folder, gripper):
    """By the formulas of RLinf's research code; learning sees the tokens that were drawn."""
    options: dict[str, Any] = {"folder": str(folder), "unnorm_key": "bridge_orig"}
    plain, policy = (OpenVLA(FIELDS, HAND, gripper=name, **options) for name in ("as_is", gripper))
    fields = _fields(TEXTS * 4)
    noise = torch.randn(12, policy.noise_size, generator=torch.Generator().manual_seed(0))
    plain_answer, acted = plain.act(fields, noise), policy.act(fields, noise)
    number = plain_answer.actions[..., -1]
    expected = -torch.sign(2 * number - 1) if gripper == "open_is_minus_one" else 2.0 * (number > 0.5) - 1
    assert set(expected.flatten().tolist()) == {-1.0, 1.0}
    assert torch.equal(acted.actions[..., -1], expected)
    assert torch.equal(acted.actions[..., :-1], plain_answer.actions[..., :-1])
    assert not plain_answer.extras
    with torch.no_grad():
        logprobs = policy.evaluate(fields, acted.actions, acted.extras).logprobs
        assert torch.equal(logprobs, plain.evaluate(fields, plain_answer.actions, {}).logprobs)
        torch.testing.assert_close(logprobs, plain_answer.logprobs, rtol=1e-5, atol=1e-5)
        is_open = torch.arange(12)[:, None] % 3 == 0
        opened = -1.0 if gripper == "open_is_minus_one" else 1.0
        demonstrated, published = plain_answer.actions.clone(), plain_answer.actions.clone()
        demonstrated[..., -1], published[..., -1] = torch.where(is_open, opened, -opened), is_open.float()
        assert torch.equal(policy.imitate(fields, demonstrated, noise), plain.imitate(fields, published, noise))


def test_a_small_model_learns_the_gripper_of_checkpoints():
    check_policy(OpenVLA, FIELDS, HAND, gripper="open_is_one", **SIZES)
    policy = OpenVLA(FIELDS, HAND, gripper="open_is_one", **SIZES)
    assert policy.table[:, [0, 254]].flatten().tolist() == pytest.approx(
        [-254 / 255, 254 / 255] * 2 + [1 / 510, 509 / 510]
    )


def test_grippers_that_would_move_wrongly_are_refused(folder):
    options = {"folder": str(folder), "unnorm_key": "bridge_orig"}
    with pytest.raises(PolicyError, match=r"is from 0.25 to 0.25, like a gripper .* set options.gripper to open_is"):
        OpenVLA.needs(FIELDS, HAND, **options)
    with pytest.raises(PolicyError, match=r"the environment takes -1.0 to 3.0 there; use as_is"):
        OpenVLA.needs(FIELDS, ACTIONS, gripper="open_is_one", **options)
    with pytest.raises(PolicyError, match=r"gripper is 'closed'; use one of as_is, open_is_minus_one, open_is_one"):
        OpenVLA.needs(FIELDS, HAND, gripper="closed", **options)
    OpenVLA.needs(FIELDS, HAND, gripper="as_is", **options)
    OpenVLA.needs(FIELDS, HAND)


def _copy(folder: Path, to: Path, **changes) -> str:
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return str(to)


def test_other_checkpoints_are_refused(folder, tensors, tmp_path):
    def needs(at: str | Path, unnorm_key: str | None = "bridge_orig") -> None:
        OpenVLA.needs(FIELDS, ACTIONS, folder=str(at), unnorm_key=unnorm_key)

    needs(folder)
    with pytest.raises(PolicyError, match=r"options width: a model from options.folder has the sizes of its files"):
        OpenVLA.needs(FIELDS, ACTIONS, folder=str(folder), unnorm_key="bridge_orig", width=32)
    with pytest.raises(PolicyError, match=r"no statistics of 'fractal'; norm_stats has bridge_orig, kuka"):
        needs(folder, "fractal")
    with pytest.raises(PolicyError, match=r"unnorm_key is not set; norm_stats has bridge_orig, kuka"):
        needs(folder, None)
    with pytest.raises(PolicyError, match="its actions have 1 numbers, but the environment takes 3"):
        needs(folder, "kuka")
    with pytest.raises(PolicyError, match=r"config.json does not exist"):
        needs(tmp_path)
    with pytest.raises(PolicyError, match="is a checkpoint of 'qwen2'"):
        needs(_copy(folder, tmp_path, model_type="qwen2"))
    other = _copy(folder, tmp_path)
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors | {"proprio_projector.fc1.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(PolicyError, match=r"has tensors that OpenVLA does not have: proprio_projector.fc1.weight"):
        needs(other)
    lacking = {name: tensor for name, tensor in tensors.items() if "projector.fc3" not in name}
    save_file(lacking, tmp_path / "model.safetensors")
    with pytest.raises(WeightFilesError, match=r"projector.fc3.weight, projector.fc3.bias not in its safetensors"):
        needs(other)


def test_a_checkpoint_may_be_in_half_precision(folder, tensors, tmp_path):
    at = _copy(folder, tmp_path)
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    policy = OpenVLA(FIELDS, ACTIONS, folder=at, unnorm_key="bridge_orig", dtype="bfloat16")
    assert policy.projector.fc1.weight.dtype == torch.bfloat16
    answer = policy.act(_fields(), None)
    assert answer.logprobs.dtype == answer.values.dtype == torch.float32
    assert torch.equal(policy.projector.fc1.weight, tensors["projector.fc1.weight"].bfloat16())


def test_a_trained_policy_goes_back_into_the_published_format(folder, tensors, tmp_path):
    others = check_published(_policy(folder), lambda at: _policy(Path(at)), folder, tmp_path)
    assert {name.partition(".")[0] for name in others} == {"value_head"}
    unused = [name for name in tensors if name not in _policy(folder).state_dict()]
    written = WeightFiles(tmp_path)
    assert unused and all(torch.equal(written.read(name), tensors[name]) for name in unused)
