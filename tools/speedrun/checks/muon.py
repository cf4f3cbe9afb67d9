"""Muon's arithmetic with a switch for every usual slip, to say what an optimizer does instead."""

from collections.abc import Sequence

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)

# Ways to make a matrix orthogonal: words, and what usually lies behind them.
# `orthogonal` has those up to "sign"; the others are seen in another way.
WAYS = {
    "five": ("five Newton-Schulz steps with 3.4445, -4.7750, 2.0315", ""),
    "four": ("four Newton-Schulz steps", "Count the rounds of the loop."),
    "six": ("six Newton-Schulz steps", "Count the rounds of the loop."),
    "three": ("three Newton-Schulz steps", "Count the rounds of the loop."),
    "ten": ("ten Newton-Schulz steps", "Count the rounds of the loop."),
    "cubic": ("the cubic Newton-Schulz iteration (1.5 X - 0.5 X X'X)",
              "Muon's quintic is steeper at zero: three coefficients."),
    "quintic": ("the textbook's quintic (15, -10, 3) / 8",
                "Muon's coefficients are steeper at zero and do not converge to 1."),
    "exact": ("an exactly orthogonal matrix, all singular values 1",
              "The record's five steps leave them between 0.68 and 1.20, and its rates fit that."),
    "unscaled": ("Newton-Schulz without the division by the Frobenius norm",
                 "The iteration needs singular values of at most 1 to begin with."),
    "spectral": ("Newton-Schulz after a division by the largest singular value",
                 "Divide by the Frobenius norm."),
    "joint": ("stacked matrices made orthogonal as one",
              "Queries, keys and values are matrices of their own: split, then orthogonalise."),
    "none": ("momentum that is not orthogonalised", "Is Newton-Schulz called on the update?"),
    "sign": ("moved by Adam: every entry by the same amount at first",
             "The matrices of the layers belong to Muon, all of them."),
    "rough": ("Newton-Schulz with few digits",
              "bfloat16? With bf16=False the script computes in float32: let args.bf16 decide."),
    "other": ("singular values as no usual iteration leaves them",
              "Check the three coefficients and how often they are applied."),
    "strange": ("an update with other singular vectors than the momentum",
                "Newton-Schulz keeps the singular vectors: X <- aX + b(XX')X + c(XX')^2 X; for a "
                "tall matrix transpose before and after."),
    "backwards": ("an update with the right matrix and the wrong sign",
                  "The weights move against the update: subtract lr times it."),
    "decay": ("the update, and the weights also shrink", "Muon has no weight decay here."),
    "still": ("no move in the first step", "Is it left out, or its rate zero?"),
    "none has it": ("no optimizer has it", "All matrices of the layers belong to Muon."),
}

MOMENTA = {
    "nesterov": ("M <- mu M + G, then the update G + mu M", ""),
    "heavy": ("the momentum M itself, without looking ahead",
              "Nesterov's update is G + mu M, with the M that already holds G."),
    "dampened": ("G + mu M with a dampened M <- mu M + (1 - mu) G",
                 "M is a sum, not a mean: no factor 1 - mu."),
    "old": ("G + mu M with the M from before this step",
            "First M <- mu M + G, then G + mu M: the M of this step."),
    "swapped": ("M + mu G: the factor on the wrong one",
                "Nesterov's update is G + mu M: this gradient whole, the momentum less."),
    "unit": ("a momentum of gradients that were divided by their norms",
             "The sum is of the gradients as they are: a large one counts more."),
    "no": ("the gradient alone, without momentum",
           "Does the buffer survive from step to step (self.state[param])?"),
}


def momentum_updates(gradients: Sequence[torch.Tensor], momenta: Sequence[float], kind: str):
    """The updates of all steps that a kind of MOMENTA makes of gradients, with momenta[i] in step
    i."""
    M, updates = torch.zeros_like(gradients[0]), []
    for G, mu in zip(gradients, momenta, strict=True):
        G = G / G.norm() if kind == "unit" else G
        old, M = M, mu * M + ((1 - mu) * G if kind == "dampened" else G)
        special = {"heavy": M, "old": G + mu * old, "swapped": M + mu * G, "no": G}
        updates.append(special.get(kind, G + mu * M))
    return updates


def orthogonal(update: torch.Tensor, way: str, parts: int = 1) -> torch.Tensor:
    """What one of WAYS makes of an update that is `parts` matrices on top of each other."""
    if parts > 1 and way != "joint":
        return torch.cat([orthogonal(part, way) for part in update.chunk(parts)])
    if way == "none":
        return update
    if way == "sign":
        return update.sign()
    if way == "exact":
        left, _, right = torch.linalg.svd(update, full_matrices=False)
        return left @ right
    rounds = {"three": 3, "four": 4, "six": 6, "ten": 10, "cubic": 20, "quintic": 20}.get(way, 5)
    a, b, c = dict(cubic=(1.5, -0.5, 0.0), quintic=(1.875, -1.25, 0.375)).get(way, COEFFICIENTS)
    X = update
    if way == "spectral":
        X = X / torch.linalg.matrix_norm(X, 2)
    elif way != "unscaled":
        X = X / (X.norm() + 1e-7)
    tall = X.size(0) > X.size(1)
    X = X.T if tall else X
    for _ in range(rounds):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if tall else X


# Factors of a rows x cols update. Which one is right the milestone's own snapshot tells.
SCALES = {
    "sqrt(max(rows, cols))": lambda r, c: max(r, c) ** 0.5,
    "sqrt(max(1, rows / cols))": lambda r, c: max(1, r / c) ** 0.5,
    "1": lambda r, c: 1.0,
    "sqrt(max(1, cols / rows))": lambda r, c: max(1, c / r) ** 0.5,
    "sqrt(rows / cols)": lambda r, c: (r / c) ** 0.5,
    "sqrt(cols / rows)": lambda r, c: (c / r) ** 0.5,
    "sqrt(min(rows, cols))": lambda r, c: min(r, c) ** 0.5,
    "sqrt(rows)": lambda r, c: r**0.5,
    "sqrt(cols)": lambda r, c: c**0.5,
    "max(rows, cols)": lambda r, c: max(r, c),
    "max(1, rows / cols)": lambda r, c: max(1, r / c),
    "1 / sqrt(max(rows, cols))": lambda r, c: max(r, c) ** -0.5,
    "0.2 sqrt(max(rows, cols))": lambda r, c: 0.2 * max(r, c) ** 0.5,
}
