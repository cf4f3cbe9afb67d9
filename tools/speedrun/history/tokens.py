"""Counts the tokens of a run: steps times tokens per step, or more where the batch grows in stages.

A script with hyperparameters of the kind "stage rate" has stages of equal length: the first, and
one for each of these rates. A step of the second takes twice the first's tokens, and so on; steps
after scheduled_steps take as many as the last stage's.
"""

import itertools
from collections.abc import Iterator

from speedrun.history.glossary import load_glossary


def stages(hyperparameters: dict[str, object]) -> int:
    """The number of stages in which the batch grows; 1 if it does not."""
    return 1 + sum(name in hyperparameters for name in load_glossary().of_kind("stage rate"))


def batch_settings(hyperparameters: dict[str, object]) -> dict[str, object]:
    """Those of the hyperparameters by which the batch grows; none if it does not."""
    names = "total_batch_size", "scheduled_steps", *load_glossary().of_kind("stage rate")
    grows = stages(hyperparameters) > 1
    return {name: hyperparameters[name] for name in names if grows and name in hyperparameters}


def step_tokens(hyperparameters: dict[str, object]) -> Iterator[int]:
    """The tokens of each step, without end; hyperparameters as for tokens_after."""
    batch, number = int(hyperparameters["total_batch_size"]), stages(hyperparameters)
    scheduled = int(hyperparameters["scheduled_steps"]) if number > 1 else 1
    return (batch * min(number, 1 + number * step // scheduled) for step in itertools.count())


def tokens_after(hyperparameters: dict[str, object], steps: float) -> float:
    """Tokens of a run's first `steps` steps; hyperparameters are whole numbers, or text of one."""
    batch, number = int(hyperparameters["total_batch_size"]), stages(hyperparameters)
    if number == 1:
        return steps * batch
    scheduled = int(hyperparameters["scheduled_steps"])
    starts = [-(-scheduled * stage // number) for stage in range(number)]  # each adds a batch
    return batch * sum(max(0, steps - start) for start in starts)
