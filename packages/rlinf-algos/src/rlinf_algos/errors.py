"""The package's errors. All are `ValueError` too."""


class AlgosError(ValueError):
    """Anything rlinf-algos refuses."""


class ShapeError(AlgosError):
    """Tensors whose shapes do not fit together. Nothing broadcasts unless a docstring says so."""


class NonFiniteError(AlgosError):
    """A NaN or an infinity where a number must be; names the tensor, the index and the value."""


class RewardError(AlgosError):
    """A reward that could not be computed: unknown name, unusable reference answer, or a checker that crashed."""
