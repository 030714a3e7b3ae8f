"""Weights into SGLang's own processes: its tokens are those of transformers after every sync, and whatever it would
serve that was not published is named before a prompt is taken."""

import sys
from pathlib import Path

import pytest
import torch

from rlinf_comm.errors import LayoutError, WeightMismatchError
from rlinf_comm.weights import Layout, plan, specs_of
from rlinf_workers.generation.sampling import SamplingSettings
from rlinf_workers.generation.sglang import engine as engine_module
from rlinf_workers.links.base import Settle, WeightPort
from rlinf_workers.links.shared import SharedWeightLink
from rlinf_workers.models.language_model import build_model
from rlinf_workers.records.language import Prompt
from rlinf_workers.testing.architectures import tiny_architecture

sys.path.append(str(Path(__file__).parent))  # for broken_loader.py, here and in SGLang's processes

import broken_loader

EDGE = "actor -> rollout"
NUM_SYNCS = 20
LOGPROB_BOUND = 1e-5
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
"""SGLang pads what its kernels on a CPU cannot cut; these divide."""
GREEDY = SamplingSettings(group_size=1, max_new_tokens=8, temperature=0.0)
PROMPTS = [
    Prompt(index=i, token_ids=torch.tensor(ids), reference_answer="")
    for i, ids in enumerate([[3, 7, 5, 8, 10], [4], [9, 2, 11]])
]


class Sync:
    """A model that is trained in this process, and SGLang."""

    def __init__(self, name, folder, *, tp=1, fault_file=None):
        self.fault_file = fault_file
        settings = tiny_architecture(name, folder, **SIZES)
        self.model = build_model(settings, torch.device("cpu"))
        self.weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        self.engine = engine_module.SGLangEngine(
            settings,
            torch.device("cpu"),
            max_prompt_tokens=8,
            devices=[f"cpu:{i}" for i in range(tp)],
            max_total_tokens=2000,
        )
        specs = specs_of(self.weights)
        reshard = plan(Layout.replicated(specs, 1), self.engine.layout().with_dtypes_of(specs))
        self.link = SharedWeightLink(EDGE, reshard)

        def port(side, rank):
            return WeightPort(
                edge=EDGE, side=side, rank=rank, reshard=reshard, link="shared", address=self.link.address
            )

        self.sender = SharedWeightLink.open_sender(port("send", 0))
        self.receiver = self.engine.open_receiver([port("receive", rank) for rank in range(tp)])
        self.version = 0
        self.settle: Settle | None = None

    def publish(self):
        if self.settle is not None:
            self.settle()
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        for tensor in self.weights.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + (tensor.dim() == 1))
        self.settle = self.sender.publish(self.weights, self.version)
        check = self.receiver.receive({}, self.version)
        assert check is not None, "an engine's weights are checked after they came"
        return check

    def serve(self):
        self.publish()()
        self.engine.weights_received(self.version)

    @torch.no_grad()
    def check_tokens(self):
        """Greedy tokens are those of transformers, log-probabilities those of a plain forward."""
        self.engine.submit(PROMPTS, GREEDY, seed=1, step=0)
        missing = {prompt.index for prompt in PROMPTS}
        while missing:
            for part in self.engine.finished():
                missing.remove(part.index)
                assert part.policy_version == (self.version or -1)
                ids = PROMPTS[part.index].token_ids
                found = part.token_ids[0][part.loss_mask[0].bool()]
                made = self.model.generate(
                    ids[None], attention_mask=torch.ones_like(ids)[None], do_sample=False, max_new_tokens=8
                )
                assert found.tolist() == made[0, len(ids) :].tolist()
                logits = self.model(torch.cat([ids, found])[None]).logits[0, len(ids) - 1 : -1]
                expected = logits.log_softmax(-1).gather(-1, found[:, None])[:, 0]
                assert (part.logprobs[0, : len(found)] - expected).abs().max() <= LOGPROB_BOUND


@pytest.mark.parametrize(("name", "tp"), [("qwen2", 1), ("qwen3", 1), ("llama", 1), ("qwen2", 2)])
def test_tokens_are_those_of_transformers_after_every_sync(name, tp, tmp_path):
    sync = Sync(name, tmp_path, tp=tp)
    sync.check_tokens()
    for _ in range(NUM_SYNCS):
        sync.serve()
        sync.check_tokens()
    sync.engine.close()


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A Qwen3-MoE, whose loader may be broken."""
    fault_file = tmp_path_factory.mktemp("fault") / "fault"
    fault_file.write_text("")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(broken_loader.FAULT_FILE, str(fault_file))
        patched.setattr(engine_module, "LOADER", broken_loader.LOADER)
        sync = Sync("qwen3_moe", tmp_path_factory.mktemp("model"), fault_file=fault_file)
        yield sync
        sync.engine.close()


@pytest.mark.minimum
def test_experts_are_served_after_every_sync(experts):
    experts.check_tokens()
    for _ in range(NUM_SYNCS):
        experts.serve()
        experts.check_tokens()


@pytest.mark.minimum
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("skip", r"model\.layers\.1\.self_attn\.[qkv]_proj\.weight.*differ"),
        ("swap", r"model\.layers\.1\.mlp\.experts\.gate_up_proj.*differs"),
        ("bit", r"model\.layers\.1\.self_attn\.q_proj\.weight differs"),
        ("old", r"model\.embed_tokens\.weight.*differ"),
        ("replace", r"model\.layers\.1\.self_attn\.qkv_proj\.weight lie elsewhere"),
        ("nothing", r"was not filled"),
    ],
)
def test_a_loader_that_says_success_and_did_something_else_is_named(experts, fault, text):
    """The next sync is served again, by the same engine."""
    experts.fault_file.write_text(fault)
    check = experts.publish()
    with pytest.raises(WeightMismatchError, match=text) as raised:
        check()
    assert f"version {experts.version}" in str(raised.value) and "engine process 0 (pid " in str(raised.value)
    experts.fault_file.write_text("")
    experts.serve()
    experts.check_tokens()


def test_parameters_that_sglang_has_padded_are_refused_by_name(tmp_path, monkeypatch):
    """An MLP of 48 over two processes: SGLang's kernels on a CPU want 64."""
    monkeypatch.setitem(SIZES, "intermediate_size", 48)
    with pytest.raises(LayoutError, match=r"qwen2, engine process 0: .*mlp\.down_proj\.weight is float32 \[64, 32\]"):
        Sync("qwen2", tmp_path, tp=2)
