"""Worker extensions for vLLM: one that fills weights as `broken_loader` says and damages them when it is told to, and
one that leaves vLLM as its users start it."""

from safetensors.torch import load_file
from vllm.distributed import parallel_state  # pyright: ignore[reportMissingImports]

from broken_loader import Broken
from rlinf_workers.engines.vllm.extension import Extension, TemperedSampler, check_plain


class BrokenExtension(Extension):
    rlinf_kind = Broken

    def rlinf_enter(self, ticket: str) -> None:
        Broken.rank = parallel_state.get_tp_group().rank_in_group
        super().rlinf_enter(ticket)

    def rlinf_damage(self, name: str) -> None:
        """One number of a parameter becomes another."""
        dict(self.model_runner.get_model().named_parameters())[name].data.view(-1)[0] += 1

    def rlinf_load(self, folder: str) -> None:
        """The weights of a folder, by vLLM's own loader of the model."""
        self.model_runner.get_model().load_weights(load_file(f"{folder}/model.safetensors").items())


class OwnWay(BrokenExtension):
    """For an engine with vLLM's own loader: weights are arranged for its kernels, and nothing checks them."""

    def rlinf_prepare(self) -> None:
        sampler = self.model_runner.sampler
        self.model_runner.sampler = TemperedSampler(sampler.logprobs_mode, sampler.use_fp64_gumbel)

    def rlinf_check(self) -> None:
        check_plain(self.model_runner.get_model())
