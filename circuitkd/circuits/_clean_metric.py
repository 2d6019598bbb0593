"""What every measurement against a clean run says about that run."""

from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from circuitkd.metrics import UNITS, bootstrap_interval


class CleanMetric:
    """Unit, interval and competence, for results that have ``metric`` and ``clean``."""

    metric: str
    clean: Float[Tensor, "prompt"]

    @property
    def unit(self) -> str:
        """Unit of effects and clean metric: ``logits`` or ``probability``."""
        return UNITS[self.metric]

    @cached_property
    def clean_interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the mean clean metric, over prompts."""
        return bootstrap_interval(self.clean.double().numpy())

    @property
    def competent(self) -> bool:
        """Whether the model does the task: the interval of its clean metric lies above 0."""
        return self.clean_interval[0] > 0
