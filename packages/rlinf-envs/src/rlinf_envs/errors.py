"""The errors of this package: one tree, so that a caller can catch `EnvError` and be done."""

from __future__ import annotations


class EnvError(ValueError):
    """What a user can get wrong: an unknown id, an option, a seed, an action of the wrong shape."""


class RenderingUnavailableError(EnvError):
    """Images were asked for on a machine on which this environment cannot draw."""


class EnvCrashedError(EnvError):
    """An environment raised, or its process died, while it ran."""

    def __init__(self, env_index: int, problem: str) -> None:
        super().__init__(f"env {env_index}: {problem}")
        self.env_index = env_index
        """The row, 0..N-1 (the first one, if the process of several died)."""
        self.problem = problem

    def __reduce__(self) -> tuple[type[EnvCrashedError], tuple[int, str]]:
        return type(self), (self.env_index, self.problem)  # pickle would call the class with the text alone


class ConformanceError(EnvError):
    """An environment breaks the rules of `rlinf_envs.BatchedEnv`; raised by `rlinf_envs.testing.check_env`."""
