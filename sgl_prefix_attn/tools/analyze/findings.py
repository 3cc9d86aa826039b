"""What two simulated servers say about a load: numbers, and one sentence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.tools.analyze.simulation import Simulated

ERROR = 0.05  # of predicted ratios of TPOT: less than that is no difference
BARELY = 1.1  # reuse below which what is gained comes from elsewhere
SHARED = 1.3  # reuse from which it is not for lack of sharing that nothing is gained
BEHIND = 0.1  # of all requests: a server in which more are left to begin is saturated


@dataclass(frozen=True)
class Findings:
    """stock, prefix: the two runs; span: seconds over which requests come."""

    stock: Simulated
    prefix: Simulated
    span: float

    @property
    def saved_mean(self) -> float:
        """Return the share of KV reads that the mean decode step is spared."""
        return self._mean([look.saved for look in self.prefix.looks])

    @property
    def prefix_share(self) -> float:
        """Return the share of decode steps that run prefix kernels."""
        return self._mean([look.is_prefix for look in self.prefix.looks])

    def _mean(self, values: list) -> float:
        return float(np.average(values, weights=self.prefix.weights)) if values else 0.0

    @property
    def saved_p90(self) -> float:
        """Return the share of KV reads that a tenth of the decode steps are spared at least."""
        saved = [look.saved for look in self.prefix.looks]
        return _quantile(saved, self.prefix.weights, 0.9) if saved else 0.0

    def between_tokens(self, run: Simulated) -> float:
        """Return the milliseconds of the decode step of the median token, without prefills in
        between; NaN where none decodes."""
        if not run.looks:
            return float("nan")
        tokens = run.weights * np.array([look.running for look in run.looks])
        return _quantile([1e3 * look.seconds for look in run.looks], tokens, 0.5)

    def tpot(self, run: Simulated, quantile: float | None) -> float:
        """Return milliseconds, the mean over requests or a quantile; NaN where none decodes."""
        known = run.tpot[~np.isnan(run.tpot)]
        if not known.size:
            return float("nan")
        return 1e3 * float(known.mean() if quantile is None else np.quantile(known, quantile))

    @property
    def ratio(self) -> float:
        """Return the median TPOT with the plugin over FlashInfer's; 1 where nothing decodes."""
        stock = self.tpot(self.stock, 0.5)
        return self.tpot(self.prefix, 0.5) / stock if stock > 0 else 1.0

    @property
    def left_waiting(self) -> int:
        """Count the requests that wait in FlashInfer's server when the last one has come."""
        return next((look.waiting for look in self.stock.looks if look.at >= self.span), 0)

    @property
    def is_saturated(self) -> bool:
        """Tell whether requests come faster than FlashInfer's server gets done with them."""
        return self.left_waiting > BEHIND * self.stock.ttft.size

    @property
    def verdict(self) -> str:
        """Say in one sentence whether it will help."""
        if not self.prefix.looks:
            return "It cannot help: no request generates a second token."
        ratio, reuse = self.ratio, self.prefix.reuse
        shared = f"on average {reuse:.2f} running requests share each KV token"
        tpot = f"TPOT is {ratio:.3f} of FlashInfer's"
        if abs(ratio - 1) <= ERROR:
            why = ", but reading it once gains a step too little" if reuse > SHARED else ""
            return f"No difference: {tpot}, inside its error of {ERROR:.0%}; {shared}{why}."
        if ratio > 1:
            return f"It will cost: {shared}, and {tpot}."
        if reuse >= BARELY:
            return f"It will help: {shared}, and {tpot}."
        return (
            f"It will help, but not by sharing: {shared}, and {tpot}, whose kernels are predicted "
            "to run these lengths less evenly."
        )


def _quantile(values: list[float], weights: np.ndarray, quantile: float) -> float:
    """The value up to which values have that share of the weights."""
    return float(np.quantile(values, quantile, weights=weights, method="inverted_cdf"))
