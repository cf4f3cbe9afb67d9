"""Checks, hints and solutions of the exercises in lessons/p4_fused_adamw.ipynb."""

from functools import cache

import torch

from speedrun.history.manifest import load_manifest
from speedrun.scripts.find import load_snapshot

m4d = load_snapshot(load_manifest().get("p4d").script)

# ---- 1: a stack that shows the bug ----


def version_1(stack):
    """The notebook's first version, with its bug."""
    X = stack / (1.02 * stack.norm() + 1e-6)
    for a, b, c in m4d.POLAR_EXPRESS:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def check_stack(answer):
    assert isinstance(answer, torch.Tensor) and answer.ndim == 3, (
        "expected one tensor of three dimensions, (matrices, rows, columns); a list of matrices"
        " becomes one with torch.stack")
    stack = answer.detach().float()
    assert stack.isfinite().all(), "expected finite numbers; your stack has inf or nan in it"
    assert stack.size(1) <= stack.size(2), (
        f"expected square or wide matrices, got {stack.size(1)} x {stack.size(2)}; version 1 does"
        " not transpose tall ones, but that is a waste of time, not the bug")
    right = torch.linalg.svdvals(m4d.polar_express(stack, bf16=False)).min()
    found = torch.linalg.svdvals(version_1(stack)).min()
    assert right > 0.8, (
        f"the snapshot's smallest singular value on your stack is {right:.2f}: use matrices that it"
        " brings above 0.8, such as multiples of the identity")
    assert found < 0.5, (
        f"version 1's smallest singular value on your stack is {found:.2f}, the snapshot's"
        f" {right:.2f}: the bug does not show. Look for the line that mixes a stack's matrices")
    print(f"smallest singular values: version 1 {found:.3f}, snapshot {right:.3f}")


# ---- 2: ranks without a matrix ----


def check_idle(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of ranks, not {answer!r}") from None
    hints = {
        12: "that many ranks own an MLP matrix; the question is how many own nothing",
        20: "20 ranks own no MLP matrix, but some of these own square matrices",
        0: "with 32 ranks the 48 square matrices are padded to 64, two places for each rank",
        16: "48 square matrices do not spread over 32 ranks as 1 or 2 each: chunks are consecutive",
        24: "24 ranks own square matrices; the question is how many own nothing",
    }
    assert value == 8, (
        f"expected the number of ranks without any matrix, got {value:g}; "
        + hints.get(value, "find the chunk length of each padded stack first, then its last owner"))


# ---- 3: one stack of 24 instead of two of 12 ----

RANKS = 8


def one_stack(ups, downs):
    views = [*ups, *(down.mT for down in downs)]
    return views, [2.0] * len(ups) + [1.0] * len(downs)


def _all_tall(ups, downs):
    return [*ups, *(down.mT for down in downs)], [2.0] * 24


def _all_one(ups, downs):
    return [*ups, *(down.mT for down in downs)], [1.0] * 24


def _reshaped(ups, downs):
    return [*ups, *(down.view_as(up) for up, down in zip(ups, downs, strict=True))], (
        [2.0] * 12 + [1.0] * 12)


def _copies(ups, downs):
    return [*ups, *(down.mT.contiguous() for down in downs)], [2.0] * 12 + [1.0] * 12


def _not_transposed(ups, downs):
    return [*ups, *downs], [2.0] * 12 + [1.0] * 12


def _views_alone(ups, downs):
    return one_stack(ups, downs)[0]


def _ups_only(ups, downs):
    return [*ups], [2.0] * 12


def new_model():
    """A micro model of 12 layers and its hyperparameters, the same for each call."""
    torch.manual_seed(0)
    args = m4d.Hyperparameters(vocab_size=61, num_layers=12, num_heads=1, model_dim=8, seq_len=16,
                               bf16=False, compile=False, muon_lr=0.05, adam_lr=0.01)
    return m4d.GPT(args), args


class MLPStack:
    """Muon for the MLPs' matrices, packed by the answer and shared by simulated ranks."""

    def __init__(self, answer, model, args):
        self.answer, self.args, self.states = answer, args, [{} for _rank in range(RANKS)]
        self.ups = [block.mlp.c_fc.weight for block in model.blocks]
        self.downs = [block.mlp.c_proj.weight for block in model.blocks]

    def packed(self, ups, downs):
        found = self.answer(ups, downs)
        assert isinstance(found, tuple) and len(found) == 2, (
            "expected two values, views and factors: end with `return [...], [...]`")
        views, factors = found
        assert len(views) == len(factors) == len(ups) + len(downs), (
            f"expected {len(ups) + len(downs)} views and as many factors, one for each matrix of"
            f" either kind, got {len(views)} and {len(factors)}")
        shapes = {tuple(view.shape) for view in views}
        assert len(shapes) == 1, (
            f"expected views of one shape, got {sorted(shapes)}; only equal shapes can be stacked,"
            " so transpose one of the two kinds")
        owned = {tensor.data_ptr() for tensor in (*ups, *downs)}
        assert {view.data_ptr() for view in views} == owned, (
            "some of your views are copies: what is written into them does not reach the model."
            " Transpose with .mT alone, which copies nothing")
        for view in views:
            (source,) = (each for each in (*ups, *downs) if each.data_ptr() == view.data_ptr())
            assert any(each.shape == view.shape and torch.equal(each, view)
                       for each in (source, source.mT)), (
                "one of your views has the right shape but mixes rows and columns; a transpose"
                " exchanges rows and columns, a reshape does not")
        return views, torch.tensor([float(factor) for factor in factors])

    @torch.no_grad()
    def step(self, lr):
        ups, downs = ([weight.detach() for weight in each] for each in (self.ups, self.downs))
        views, factors = self.packed(ups, downs)
        stack = torch.stack(views)
        grads, _factors = self.packed([weight.grad for weight in self.ups],
                                      [weight.grad for weight in self.downs])
        own = max(1, stack.size(1) / stack.size(2)) ** 0.5  # muon_update multiplies by it
        shares = (part.chunk(RANKS) for part in (stack, torch.stack(grads), factors / own))
        for share, grad, factor, state in zip(*shares, self.states, strict=True):
            if not state:
                wide = share.size(1) < share.size(2)
                state["momentum"] = torch.zeros_like(share)
                state["second_moment"] = torch.zeros_like(share[:, :1] if wide else share[..., :1])
            m4d.muon_update(share, grad, state, lr * factor[:, None, None], self.args)
        torch._foreach_copy_(views, list(stack))


def train_losses(answer, steps):
    """The losses of a training run; with an answer the MLPs' matrices move as it packs them."""
    model, args = new_model()
    optimizers = m4d.make_optimizers(model, args)
    if answer:
        optimizers[1].param_groups[:] = optimizers[1].param_groups[:1]  # the square matrices
        mlps = MLPStack(answer, model, args)
    generator, losses = torch.Generator().manual_seed(1), []
    for _step in range(steps):
        starts = torch.randint(61, (8, 1), generator=generator)
        tokens = (starts + 3 * torch.arange(17)) % 61  # each token is its neighbour's plus three
        loss = model(tokens[:, :-1], tokens[:, 1:])
        losses.append(loss.item())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if answer:
            mlps.step(args.muon_lr)
        model.zero_grad()
    return losses


@cache
def own_losses():
    """Those of p4d as it is."""
    return train_losses(None, 16)


def check_one_stack(answer):
    found, expected = train_losses(answer, 16), own_losses()
    for step, (loss, p4d) in enumerate(zip(found, expected, strict=True)):
        assert abs(loss - p4d) < 1e-4, (
            f"at step {step} the loss is {loss:.4f}, p4d's {p4d:.4f}: your matrices move"
            " differently. A tall matrix has the factor sqrt(rows / columns), a wide one 1, as the"
            " model has them, not as you store them")
    print(f"8 ranks, 16 steps: loss {found[0]:.3f} -> {found[-1]:.3f}, as p4d's. 24 = 8 x 3: no"
          " padding.")


EXERCISES = {
    "1": dict(
        check=check_stack,
        hints=[
            "Read version 1 line by line: which operation sees the whole stack at once?",
            "Five rounds multiply a tiny singular value by about 990 at most. So it must start"
            " below 0.5 / 990 to end below 0.5.",
            "`stack.norm()` is one number for all matrices. Put a small matrix beside a large one:"
            " after the division, the small one's singular values are tiny.",
            "torch.stack([torch.eye(2), 1e4 * torch.eye(2)])",
        ],
        solution=torch.stack([torch.eye(2), 1e4 * torch.eye(2)]),
        wrong=[torch.eye(2), torch.eye(2)[None], torch.stack([torch.eye(2), 9 * torch.eye(2)]),
               torch.diag(torch.tensor([1.0, 1e-6]))[None], torch.ones(2, 5, 3)],
    ),
    "2": dict(
        check=check_idle,
        hints=[
            "Padding makes each stack a multiple of the number of ranks. How long is a chunk then?",
            "A rank's chunk of n matrices is ceil(n / 32) consecutive places; rank r begins at"
            " place r * ceil(n / 32).",
            "48 squares: two places per rank, so which ranks hold places below 48? 12 matrices: one"
            " place per rank.",
            "Ranks 0 to 23 own squares, ranks 0 to 11 also MLP matrices. Count the others of 32.",
        ],
        solution=8,
        wrong=[20, 0, 16, 24, 12, "eight"],
    ),
    "3": dict(
        check=check_one_stack,
        hints=[
            "12 + 12 = 24 is a multiple of 8. What keeps the two kinds of MLP matrices apart?",
            "Transposed input gives Muon a transposed update: PE(G') = PE(G)', and a neuron of a"
            " wide matrix is a column. Only the factor sqrt(max(1, rows / columns)) differs.",
            "Views: all ups, then each down's .mT. Factors: sqrt(4C / C) = 2 for an up, 1 for a"
            " down, because a down is wide in the model.",
            "return [*ups, *(down.mT for down in downs)], [2.0] * len(ups) + ...",
        ],
        solution=one_stack,
        wrong=[_all_tall, _all_one, _reshaped, _copies, _not_transposed, _ups_only, _views_alone],
    ),
}
