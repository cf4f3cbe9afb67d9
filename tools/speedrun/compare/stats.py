"""Numbers of several runs: the mean curve, where it reaches a loss, significance.

A curve is [(x, loss), ...] with rising x: steps, tokens or seconds.
"""

import math
import statistics
from collections.abc import Sequence

Curve = Sequence[tuple[float, float]]


def mean_curve(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """The mean of several curves at the x that all of them have."""
    common = set.intersection(*({x for x, _ in curve} for curve in curves)) if curves else set()
    values = [dict(curve) for curve in curves]
    return [(x, statistics.fmean(curve[x] for curve in values)) for x in sorted(common)]


def crossing(curve: Curve, target: float) -> float | None:
    """The first x at which the curve, straight between its points, is down at `target`; None if it
    never is."""
    for i, (x, loss) in enumerate(curve):
        if loss <= target:
            if i == 0:
                return x
            before_x, before = curve[i - 1]
            return before_x + (x - before_x) * (before - target) / (before - loss)
    return None


def p_value(losses: Sequence[float], target: float) -> float | None:
    """How likely runs at least as good as these are if the true mean loss were `target`.

    A one-sided t-test over independent runs; a small value shows that the mean loss is below the
    target. None for fewer than three runs, or where they do not differ at all.
    """
    if len(losses) < 3 or not all(map(math.isfinite, losses)) or len(set(losses)) == 1:
        return None
    from scipy.stats import ttest_1samp  # takes a second to import

    return float(ttest_1samp(losses, target, alternative="less").pvalue)
