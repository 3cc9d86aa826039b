"""A decision for stock kernels that stands for some steps, of whichever kind."""

from sgl_prefix_attn.records import Decision
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.policy import STOCK_STEPS


class StandingStock:
    """Spares the next STOCK_STEPS - 1 steps a look at their batch after one that a look gave to
    stock kernels. In check mode (SGL_PREFIX_ATTN_CHECK) every batch is looked at."""

    def __init__(self, settings: Settings):
        self._steps = 0 if settings.check else STOCK_STEPS - 1
        self._left = 0
        self._decision: Decision | None = None

    def keep(self, decision: Decision) -> None:
        """Note what a look has decided for stock kernels."""
        self._decision, self._left = decision, self._steps

    def take(self) -> Decision | None:
        """Return the decision for a step, None where a look is due."""
        if self._left == 0:
            return None
        self._left -= 1
        return self._decision
