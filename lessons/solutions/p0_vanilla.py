"""Checks, hints and solutions of the exercises in lessons/p0_vanilla.ipynb."""

import numpy as np
import torch

from speedrun.history.manifest import load_manifest
from speedrun.run.data import BUILTIN, make_builtin
from speedrun.scripts.find import load_snapshot

# ---- 1: FLOPs per byte of a head's scores ----


def check_intensity(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of FLOPs per byte, not {answer!r}") from None
    meanings = {
        28.44: "that is right for float32, which has four bytes per number, or counts one"
               " operation per term or half of the pairs; a term is a multiplication and an"
               " addition, and all pairs count",
        0.0176: "that is bytes per FLOP; turn it round",
        64: "that leaves out the bytes of Q and K, which must be read",
        512: "that leaves out the bytes of the scores, which must be written",
        113.78: "that counts one byte per number; bfloat16 has two",
        14.22: "that counts four bytes per number, and one operation per term instead of two",
        32: "that leaves out Q and K, and counts one operation per term instead of two",
    }
    if abs(value - 56.89) > 0.6:
        near = min(meanings, key=lambda wrong: abs(wrong - value))
        why = meanings[near] if abs(near - value) < 0.02 * near else (
            "divide 2 T T D operations by the bytes of Q, K and the scores")
        raise AssertionError(f"{value:g} is not the number of FLOPs per byte; {why}")


# ---- 2: a function that stays in one graph ----


def clipped(x, limit):
    return x * (limit / x.norm()).clamp(max=1)


def _with_item(x, limit):
    norm = x.norm().item()
    return x * (limit / norm) if norm > limit else x


def _with_if(x, limit):
    norm = x.norm()
    if norm > limit:
        x = x * (limit / norm)
    return x


def _always(x, limit):
    return x * (limit / x.norm())


def _entries(x, limit):
    return x.clamp(-limit, limit)


def _in_place(x, limit):
    return x.mul_((limit / x.norm()).clamp(max=1))


def _times_zero(x, limit):
    norm = x.norm()
    return (norm > limit) * x * (limit / norm)


def check_clipped(answer):
    assert callable(answer), f"expected the function clipped, not {answer!r}"
    long = torch.tensor([[3.0, -4.0], [0.0, 12.0]])  # its norm is 13
    cases = {"norm 13, limit 6.5": (long, 6.5, long / 2), "norm 13, limit 20": (long, 20.0, long),
             "only zeros, limit 1": (torch.zeros(2, 2), 1.0, torch.zeros(2, 2))}
    for name, (x, limit, right) in cases.items():
        given = x.clone()
        result = answer(given, limit)
        assert isinstance(result, torch.Tensor), (
            f"expected the scaled tensor as the return value, got {type(result).__name__}")
        assert given.equal(x), "your function changes its argument; it should return a new tensor"
        assert torch.allclose(result, right, atol=1e-6), (
            f"with {name} the result is {result.tolist()}, expected {right.tolist()}; multiply all"
            " entries by one factor, limit / norm, but never by more than 1")
    graphs = graphs_of(answer)
    assert graphs, (
        "right values, but the graph breaks: Python should not look at the norm, so no .item(),"
        " and no `if` on a tensor. Compute the factor as a tensor")
    assert graphs == 1, (
        f"right values, but inputs of one shape need {graphs} graphs; a Python number that depends"
        " on the input is compiled in as a constant")


def graphs_of(function):
    """Graphs that torch.compile makes of a function for three inputs of one shape; 0 if one graph
    cannot hold it all."""
    import torch._dynamo.testing

    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(function, backend=counter, dynamic=False, fullgraph=True)
    try:
        for scale in (0.1, 1.0, 10.0):
            compiled(scale * torch.ones(2, 2), 1.5)
    except torch._dynamo.exc.Unsupported:
        return 0
    finally:
        torch.compiler.reset()
    return counter.frame_count


# ---- 3: the longest sequence that fits a budget, trained ----

MICRO = dict(vocab_size=257, num_layers=2, num_heads=2, model_dim=32)


def longest(saved_bytes, budget):
    lengths = [64, 128, 256]
    polynomial = np.polyfit(lengths, [saved_bytes(T) for T in lengths], 2)
    T = 32
    while np.polyval(polynomial, T + 32) <= budget:
        T += 32
    return T


def _tries_all(saved_bytes, budget):
    T = 32
    while saved_bytes(T + 32) <= budget:
        T += 32
    return T


def _in_proportion(saved_bytes, budget):
    return int(budget / (saved_bytes(128) / 128)) // 32 * 32


def _straight_line(saved_bytes, budget):
    low, high = saved_bytes(64), saved_bytes(128)
    return int(64 + (budget - low) / ((high - low) / 64)) // 32 * 32


def _two_lengths(saved_bytes, budget):
    T, slope = 32, (saved_bytes(128) - saved_bytes(64)) / (128**2 - 64**2)
    while slope * (T + 32) ** 2 <= budget:
        T += 32
    return T


def _rounds_up(saved_bytes, budget):
    return longest(saved_bytes, budget) + 32


def _cautious(saved_bytes, budget):
    return longest(saved_bytes, 0.8 * budget)


def micro_model(id, T):
    """A micro model of a rung for sequences of T tokens, the same for each call; and its module."""
    module = load_snapshot(load_manifest().get(id).script)
    settings = dict(bf16=True) if id == "p1" else dict(bf16=False) if id == "p2" else {}
    torch.manual_seed(0)
    args = module.Hyperparameters(seq_len=T, micro_batch_size=1, **MICRO, **settings)
    return module.GPT(args), module, args


def loss_and_bytes(model, inputs, targets):
    """The loss, and the bytes that it keeps for the backward pass, without the parameters."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(inputs, targets)
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    return loss, sum(tensor.untyped_storage().nbytes()
                     for pointer, tensor in kept.items() if pointer not in own)


def saved_at(id, T):
    tokens = torch.zeros(1, T, dtype=torch.int64)
    return loss_and_bytes(micro_model(id, T)[0], tokens, tokens)[1]


def check_longest(answer):
    assert callable(answer), f"expected the function longest, not {answer!r}"
    budget, ends = 4_000_000, []
    for id in ("p0", "p1", "p2"):
        lengths = []

        def saved_bytes(T, id=id, lengths=lengths):
            lengths.append(T)
            assert len(lengths) <= 4, (
                f"your function measures more than four lengths ({lengths}); the bytes are"
                " c + a T + b T^2, which three lengths determine")
            return saved_at(id, int(T))

        T = answer(saved_bytes, budget)
        assert isinstance(T, (int, np.integer)) and T > 0 and T % 32 == 0, (
            f"expected a positive multiple of 32 as an int, got {T!r} for {id}; round down to one")
        model, module, args = micro_model(id, int(T))
        losses, most = train_micro(model, module, args)
        assert most <= budget, (
            f"{id} at your T of {T} saves {most:,} bytes, above the budget of {budget:,}; the bytes"
            " are c + a T + b T^2, so neither a proportion nor a straight line is enough")
        more = saved_at(id, int(T) + 32)
        assert more > budget, (
            f"{id} at your T of {T} fits, but T = {T + 32} saves {more:,} bytes and fits the budget"
            f" of {budget:,} too; return the largest multiple of 32. (Three lengths"
            " determine c + a T + b T^2; two do not, and a proportion leaves out c)")
        ends.append(f"{id} trained on rows of {T} tokens, {most:,} bytes saved:"
                    f" loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    print("\n".join(ends))


def train_micro(model, module, args, steps=12):
    """Losses of a few steps on rows of args.seq_len tokens, and the most bytes that one saved."""
    make_builtin()
    batches = module.token_batches(f"{BUILTIN}/*_train_*.bin", args.seq_len, args, 0, 1,
                                   torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, most = [], 0
    for _step in range(steps):
        loss, saved = loss_and_bytes(model, *next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        most = max(most, saved)
    return losses, most


EXERCISES = {
    "1": dict(
        check=check_intensity,
        hints=[
            "How many numbers does the product read, and how many does it write?",
            "Operations: 2 T T D. Bytes: 2 (T D + T D + T T). T is 1,024 and D is 64.",
            "Compute both numbers: 134,217,728 operations. Q and K have 65,536 numbers each, the"
            " scores 1,048,576, and a number has two bytes. Divide.",
            "134,217,728 / (2 * (65,536 + 65,536 + 1,048,576)) = 134,217,728 / 2,359,296",
        ],
        solution=56.9,
        wrong=[0.0176, 28.4, 64, 512, 113.8, 14.2, 32, 7],
    ),
    "2": dict(
        check=check_clipped,
        hints=[
            "Which line needs a number from the device before Python can go on?",
            "y = f x with f = min(1, limit / ||x||). The factor f is a tensor without dimensions.",
            "Divide limit by x.norm(), which stays a tensor; clamp the quotient to at most 1;"
            " multiply x by it. limit / 0 is infinity, which the clamp makes 1.",
            "return x * (limit / x.norm()).clamp(max=1)",
        ],
        solution=clipped,
        wrong=[_with_item, _with_if, _always, _entries, _in_place, _times_zero],
    ),
    "3": dict(
        check=check_longest,
        hints=[
            "The bytes are a polynomial in T. Of which degree, and how many lengths determine it?",
            "bytes(T) = c + a T + b T^2: c is copies of weights, a the activations per token, b the"
            " scores. The fused rung has b = 0, so do not divide by b.",
            "Measure at 64, 128 and 256; fit with np.polyfit(lengths, bytes, 2); increase T in"
            " steps of 32 while np.polyval(fit, T + 32) is at most the budget.",
            "fit = np.polyfit(lengths, [saved_bytes(T) for T in lengths], 2)\nT = 32\n"
            "while np.polyval(fit, T + 32) <= budget:\n    T += 32\nreturn T",
        ],
        solution=longest,
        wrong=[_tries_all, _in_proportion, _straight_line, _two_lengths, _rounds_up, _cautious],
    ),
}
