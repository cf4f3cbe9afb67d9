"""Exercises of lesson 11: their checks, hints and solutions."""

from copy import copy, deepcopy
from math import log

import torch
import torch.nn.functional as F

# ---- 1: the price of further targets ----


def check_price(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a loss in nats, not {answer!r}") from None
    meanings = {
        0.0: "that is a model of the next token only; yours has to leave probability for the second"
             " and third target, too",
        1.0986: "that is ln 3, as if all targets had the same weight; the next token has the"
                " largest weight, so the largest probability",
        0.9557: "that is the entropy of the whole distribution, over all three targets; validation"
                " counts the next token only",
        1.6725: "that is the loss that is trained, with its three targets and weights; validation"
                " counts the next token only",
        0.5714: "that is the next token's probability; the loss is minus its natural logarithm",
        0.9793: "that is 1.75 times the loss; validation counts the next token once",
        1.2528: "that is for the second target's probability, 2 / 7; validation counts the next"
                " token",
        0.8074: "that is in bits; take the natural logarithm",
        -0.5596: "a loss is minus the logarithm of a probability, so it is not negative",
    }
    if abs(value - log(1.75)) > 0.002:
        near = min(meanings, key=lambda known: abs(known - value))
        why = meanings[near] if abs(near - value) < 0.01 else (
            "find the probability that the best distribution gives to the next token, a weighted"
            " mean of three certainties, and take minus its logarithm")
        raise AssertionError(f"{value:g} nats is not the next token's loss: {why}")


# ---- 2: several targets ----


def cross_entropy(logits, targets, weights):
    T = targets.size(1)
    log_probs, loss = logits.log_softmax(-1), 0.0
    for k, weight in enumerate(weights):
        chosen = log_probs[:, : T - k].gather(-1, targets[:, k:, None])
        loss = loss - weight * chosen.sum()
    return loss / targets.numel()


def _per_target(logits, targets, shift):
    """Cross-entropies (B, T) with the targets that shift(k) gives; K of them, by k."""
    log_probs = logits.log_softmax(-1)
    return lambda k: -log_probs.gather(-1, shift(targets, k)[..., None])[..., 0]


def _wraps(logits, targets, weights):
    losses = _per_target(logits, targets, lambda t, k: t.roll(-k, 1))
    return sum(weight * losses(k).mean() for k, weight in enumerate(weights))


def _next_row(logits, targets, weights):
    losses = _per_target(logits, targets, lambda t, k: t.flatten().roll(-k).view_as(t))
    return sum(weight * losses(k).mean() for k, weight in enumerate(weights))


def _backwards(logits, targets, weights):
    T, log_probs, loss = targets.size(1), logits.log_softmax(-1), 0.0
    for k, weight in enumerate(weights):
        loss = loss - weight * log_probs[:, k:].gather(-1, targets[:, : T - k, None]).sum()
    return loss / targets.numel()


def _normalised(logits, targets, weights):
    return cross_entropy(logits, targets, weights) / sum(weights)


def _mean_of_each(logits, targets, weights):
    T, log_probs, loss = targets.size(1), logits.log_softmax(-1), 0.0
    for k, weight in enumerate(weights):
        loss = loss - weight * log_probs[:, : T - k].gather(-1, targets[:, k:, None]).mean()
    return loss


def _whole_windows(logits, targets, weights):
    n = targets.size(1) - len(weights) + 1
    losses = [F.cross_entropy(logits[:, :n].mT, targets[:, k : k + n]) for k in range(len(weights))]
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True))


def _padded_with_0(logits, targets, weights):
    padded = F.pad(targets, (0, len(weights) - 1))
    losses = _per_target(logits, targets, lambda t, k: padded[:, k : k + t.size(1)])
    return sum(weight * losses(k).mean() for k, weight in enumerate(weights))


def _ignores_token_0(logits, targets, weights):
    padded = F.pad(targets, (0, len(weights) - 1))
    losses = [F.cross_entropy(logits.mT, padded[:, k : k + targets.size(1)], ignore_index=0,
                              reduction="sum") for k in range(len(weights))]
    return sum(w * loss for w, loss in zip(weights, losses, strict=True)) / targets.numel()


def _without_gradient(logits, targets, weights):
    return cross_entropy(logits.detach(), targets, weights)


def _summed(logits, targets, weights):
    return cross_entropy(logits, targets, weights) * targets.numel()


def _raw_logits(logits, targets, weights):
    T, loss = targets.size(1), 0.0
    for k, weight in enumerate(weights):
        loss = loss - weight * logits[:, : T - k].gather(-1, targets[:, k:, None]).sum()
    return loss / targets.numel()


def _positive(logits, targets, weights):
    return -cross_entropy(logits, targets, weights)


def _by_row(logits, targets, weights):
    return cross_entropy(logits, targets, weights) * len(targets)


def _without_log(logits, targets, weights):
    return _raw_logits(logits.softmax(-1), targets, weights)


def _vocabulary_last(logits, targets, weights):
    return F.cross_entropy(logits, targets)


def _first_only(logits, targets, weights):
    return cross_entropy(logits, targets, weights[:1])


def reference(logits, targets, weights):
    """The same by PyTorch's own cross-entropy, which ignores a target of -100."""
    losses = [F.cross_entropy(logits.mT, F.pad(targets[:, k:], (0, k), value=-100), reduction="sum")
              for k in range(len(weights))]
    return sum(w * loss for w, loss in zip(weights, losses, strict=True)) / targets.numel()


def check_cross_entropy(answer):
    assert callable(answer), f"expected the function cross_entropy, not {answer!r}"
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 7, generator=draw)
    targets = torch.randint(1, 7, (3, 5), generator=draw)
    targets[0, 2] = 0
    for weights in ([1.0], [1.0, 0.5], [1.0, 0.5, 0.25]):
        leaf = logits.clone().requires_grad_()
        inputs = leaf.clone(), targets.clone(), torch.tensor(weights)
        try:
            result = answer(*inputs)
        except RuntimeError as problem:
            if "target size" not in f"{problem}":
                raise
            raise AssertionError(
                f"{problem}: F.cross_entropy expects the vocabulary second, (B, V, T); pass"
                " logits.mT, or work with log_softmax") from None
        assert isinstance(result, torch.Tensor) and result.numel() == 1, (
            f"your function returns {result!r}; return one number, the mean loss over all tokens,"
            " as a tensor")
        assert torch.equal(inputs[0], logits) and torch.equal(inputs[1], targets), (
            "your function changes its logits or targets; the model still needs them afterwards")
        names = {
            "the targets wrap around: a row's last positions get the row's first tokens as targets."
            " Their terms should count as 0": _wraps,
            "a row's last positions get targets from the next row of the batch; rows are separate"
            " texts, so these terms should count as 0": _next_row,
            "position i is compared with the target of i - k; the targets ahead are at i + k":
                _backwards,
            "your loss is divided by the weights' sum; the weights should not be normalised, so the"
            " loss may grow to 1.75 times": _normalised,
            "each target's mean is over the positions that have it; a missing term counts as 0, so"
            " all means are over B T": _mean_of_each,
            "your loss leaves out the row's last positions, even their next token; only the terms"
            " beyond the end should count as 0": _whole_windows,
            "beyond the row's end your target is token 0, a token like any other; its terms should"
            " count as 0": _padded_with_0,
            "your loss leaves out targets that are token 0, a token like any other; pad with an id"
            " that no token has": _ignores_token_0,
            "that is the sum over tokens; return the mean over B T": _summed,
            "that is the next token's part only; add the further targets": _first_only,
            "you take logits for log probabilities; take their log_softmax first": _raw_logits,
            "the sign is wrong: a cross-entropy is minus a log probability": _positive,
            "you divide by T only; divide by all B T positions": _by_row,
            "you sum probabilities; a cross-entropy needs their logarithms": _without_log,
        }
        right = reference(logits, targets, weights)
        if torch.allclose(result, right, atol=1e-5):
            assert result.requires_grad, (
                "your loss has the right value but no gradient, so nothing can learn from it;"
                " compute it from the logits themselves, without detach, item or no_grad")
            exact = logits.clone().requires_grad_()
            slopes = [torch.autograd.grad(loss.sum(), of)[0] for loss, of in (
                (result, leaf), (reference(exact, targets, torch.tensor(weights)), exact))]
            assert torch.allclose(*slopes, atol=1e-5), (
                f"with weights {weights} your loss is right, but its gradient is not: part of the"
                " logits is detached")
            continue
        for why, slip in names.items():
            assert not torch.allclose(result, slip(logits, targets, torch.tensor(weights)),
                                      atol=1e-5), f"with weights {weights} {why}"
        raise AssertionError(
            f"with weights {weights} your loss is {result.item():.4f} and should be"
            f" {right.item():.4f}: sum weight k times the cross-entropy of position i with target"
            " i + k, and divide by B T")


# ---- 3: embedding and head part ----

TOKENS, WIDTH, TIED, APART = 24, 16, 40, 20


def train_table(part):
    """Trains a model of pairs of tokens: with one table, then with two after part(adam, head,
    embed). Returns the losses of each step, both tables and their optimizer at the parting."""
    draw = torch.Generator().manual_seed(0)
    chances = (3 * torch.randn(TOKENS, TOKENS, generator=draw)).softmax(-1)
    head = torch.nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH, generator=draw))
    embed = torch.nn.Parameter(torch.zeros(TOKENS, WIDTH))
    mix = torch.nn.Parameter(torch.eye(WIDTH).roll(1, 0))
    adam = torch.optim.Adam([head, embed, mix], lr=0.03, betas=(0.65, 0.95))
    losses, seen = [], ()
    for step in range(TIED + APART):
        if step == TIED:
            assert embed.grad is None and embed not in adam.state
            before = head.detach().clone(), deepcopy(adam.state[head])
            part(adam, head, embed)
            seen = adam, head, embed, *before
            yield seen
        inputs = torch.randint(TOKENS, (64,), generator=draw)
        targets = torch.multinomial(chances[inputs], 1, generator=draw)[:, 0]
        table = head if step < TIED else embed
        x = F.rms_norm(table[inputs], (WIDTH,))
        loss = F.cross_entropy((x + F.rms_norm(x @ mix, (WIDTH,))) @ head.T, targets)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    yield losses, head.detach(), embed.detach()


@torch.no_grad()
def part(adam, head, embed):
    embed.copy_(head)
    adam.state[embed] = deepcopy(adam.state[head])


@torch.no_grad()
def _values_only(adam, head, embed):
    embed.copy_(head)


@torch.no_grad()
def _state_only(adam, head, embed):
    adam.state[embed] = deepcopy(adam.state[head])


@torch.no_grad()
def _one_state(adam, head, embed):
    embed.copy_(head)
    adam.state[embed] = adam.state[head]


@torch.no_grad()
def _shallow_state(adam, head, embed):
    embed.copy_(head)
    adam.state[embed] = copy(adam.state[head])


def _one_memory(adam, head, embed):
    embed.data = head.data
    adam.state[embed] = deepcopy(adam.state[head])


@torch.no_grad()
def _fresh_count(adam, head, embed):
    part(adam, head, embed)
    adam.state[embed]["step"].zero_()


@torch.no_grad()
def _without_squares(adam, head, embed):
    part(adam, head, embed)
    adam.state[embed]["exp_avg_sq"].zero_()


@torch.no_grad()
def _moved(adam, head, embed):
    embed.copy_(head)
    adam.state[embed] = adam.state.pop(head)


def _gradient_too(adam, head, embed):
    part(adam, head, embed)
    embed.grad = head.grad.clone()


def _slower(adam, head, embed):
    part(adam, head, embed)
    adam.param_groups[0]["lr"] /= 10


def _with_autograd(adam, head, embed):
    embed.copy_(head)


@torch.no_grad()
def _the_wrong_way(adam, head, embed):
    head.copy_(embed)


def check_part(answer):
    assert callable(answer), f"expected the function part, not {answer!r}"
    run = train_table(answer)
    try:
        adam, head, embed, values, state = next(run)
    except RuntimeError as problem:
        if "leaf" not in f"{problem}":
            raise
        raise AssertionError(
            "autograd refuses to write into a parameter; copy under torch.no_grad(), because"
            " copying is no part of the model") from None
    assert torch.equal(head, values), (
        "your function changes the head; the head keeps its values, and the embedding gets a copy")
    assert torch.equal(embed, values), (
        "the embedding does not have the head's values after your function; until now the model has"
        " read only the head's table, so the embedding still holds zeros. Copy in place")
    assert embed.data_ptr() != head.data_ptr(), (
        "head and embedding share their memory, so they stay one table, and each step updates it"
        " twice; copy the values into the embedding's own memory")
    assert adam.state.get(head), (
        "the head has lost its state: Adam starts again for it; copy the state, do not move it")
    mine = adam.state.get(embed)
    assert mine, (
        "the embedding has no state: Adam starts again for it, and its first update has the full"
        " rate in every weight; copy the head's state, too")
    assert mine is not adam.state[head], (
        "both parameters have the same dict as their state, so each step mixes both gradients into"
        " one mean and counts twice; give the embedding a copy")
    for name, value in state.items():
        assert name in mine, f"the embedding's state has no {name!r}; copy all of the head's state"
        assert torch.equal(mine[name], value), (
            f"the embedding's state has another {name!r} than the head's; Adam's update needs mean,"
            " mean square and the count of steps, which corrects both")
        assert mine[name].data_ptr() != adam.state[head][name].data_ptr(), (
            f"your copy of the state is shallow: {name!r} is one tensor for both parameters, so"
            " each step mixes both gradients into it; copy the tensors as well")
    assert embed.grad is None, (
        "the embedding has a gradient after your function: Adam has applied it to the shared table"
        " already, so the next step would count it twice; copy the values and the state only")
    losses, *tables = next(run)
    *_, (wanted, *right) = train_table(part)
    assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(tables, right, strict=True)), (
        f"the parting looks right, but after {APART} further steps the tables differ from those of"
        " a run that copies values and state; leave everything else as it is")
    print(f"loss before the parting {losses[TIED - 1]:.2f}; mean of the five steps after it"
          f" {sum(losses[TIED : TIED + 5]) / 5:.2f}")


EXERCISES = {
    "1": dict(
        check=check_price,
        hints=[
            "Which distribution has the smallest weighted sum of three cross-entropies?",
            "The weighted sum of cross-entropies is 1.75 times the cross-entropy with the weighted"
            " mean of the three target distributions, so the best p is this mean.",
            "Each target is certain, so p is (1, 1/2, 1/4) divided by 1.75. Validation takes the"
            " next token's probability.",
            "The next token has probability 1 / 1.75; the loss is minus the logarithm of it, ...",
        ],
        solution=0.5596,
        wrong=[0, 0.9793, 1.2528, 1.0986, 0.9557, 1.6725, 0.5714, 5 / 9, 0.8074, -0.5596, 0.3,
               "little"],
    ),
    "2": dict(
        check=check_cross_entropy,
        hints=[
            "Which positions have a target k further on, and which number do all sums share?",
            "For each k: positions 0 to T - k - 1 and targets k to T - 1. Divide the sum by B T.",
            "Take log_softmax once; for each k slice it [:, : T - k], gather the targets[:, k:],"
            " sum, multiply by the weight.",
            "log_probs[:, : T - k].gather(-1, targets[:, k:, None]).sum() is one target's; add"
            " minus the weights times these and divide by targets.numel(), ...",
        ],
        solution=cross_entropy,
        wrong=[_wraps, _next_row, _backwards, _normalised, _mean_of_each, _whole_windows,
               _padded_with_0, _ignores_token_0, _without_gradient, _summed, _first_only,
               _raw_logits, _positive, _by_row, _without_log, _vocabulary_last,
               lambda logits, targets, weights: None],
    ),
    "3": dict(
        check=check_part,
        hints=[
            "What does Adam know of a table besides its values?",
            "An update is made of a mean, a mean square and the count of steps that corrects both;"
            " adam.state[head] is the dict of the three.",
            "Copy the values in place under torch.no_grad(); then give the embedding a state of its"
            " own, with tensors of its own.",
            "embed.copy_(head) without gradients; adam.state[embed] = a deepcopy of ...",
        ],
        solution=part,
        wrong=[_values_only, _state_only, _one_state, _shallow_state, _one_memory, _fresh_count,
               _without_squares, _moved, _gradient_too, _slower, _the_wrong_way, _with_autograd,
               lambda adam, head, embed: None],
    ),
}
