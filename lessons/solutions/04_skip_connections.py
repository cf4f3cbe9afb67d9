"""Checks, hints and solutions of the exercises in lessons/04_skip_connections.ipynb."""

import torch

# ---- 1: the U-net's order ----


def unet(x, layers, weights):
    skips, half = [], len(layers) // 2
    for i, layer in enumerate(layers):
        if i >= half:
            x = x + weights[i - half] * skips.pop()
        x = layer(x)
        if i < half:
            skips.append(x)
    return x


def _first_in_first_out(x, layers, weights):
    skips, half = [], len(layers) // 2
    for i, layer in enumerate(layers):
        if i >= half:
            x = x + weights[i - half] * skips.pop(0)
        x = layer(x)
        if i < half:
            skips.append(x)
    return x


def _added_after_the_layer(x, layers, weights):
    skips, half = [], len(layers) // 2
    for i, layer in enumerate(layers):
        x = layer(x)
        if i < half:
            skips.append(x)
        else:
            x = x + weights[i - half] * skips.pop()
    return x


def _inputs_kept(x, layers, weights):
    skips, half = [], len(layers) // 2
    for i, layer in enumerate(layers):
        if i < half:
            skips.append(x)
        else:
            x = x + weights[i - half] * skips.pop()
        x = layer(x)
    return x


def _weights_from_the_end(x, layers, weights):
    return unet(x, layers, list(weights)[::-1])


def _in_place(x, layers, weights):
    skips, half = [], len(layers) // 2
    for i, layer in enumerate(layers):
        if i >= half:
            x += weights[i - half] * skips.pop()
        x = layer(x)
        if i < half:
            skips.append(x)
    return x


def _detached(x, layers, weights):
    skips, half = [], len(layers) // 2
    for i, layer in enumerate(layers):
        if i >= half:
            x = x + weights[i - half] * skips.pop()
        x = layer(x)
        if i < half:
            skips.append(x.detach())
    return x


def _no_skips(x, layers, weights):
    for layer in layers:
        x = layer(x)
    return x


def check_unet(answer):
    layers = [lambda x: x + 1, lambda x: 2 * x, lambda x: 3 * x, lambda x: x + 10]
    meanings = {
        37: "the order is first in, first out; the last output must be added first",
        30: "each skip is added after its layer; add it to the layer's input",
        28: "you keep the inputs of the first layers; keep their outputs",
        36: "the weights are not used",
        59: "the weights are used from the end; weights[0] is for the second half's first layer",
        22: "no skip is added",
        16: "the skips replace the stream; add them to it",
    }
    got = answer(torch.tensor(1.0), layers, [0.5, 3.0])
    assert got is not None, "the function returns nothing; return the last layer's output"
    got = float(got)
    assert abs(got - 34) < 1e-4, (
        "expected 34 from the layers x + 1, 2x, 3x, x + 10 with weights 0.5 and 3 at x = 1, got"
        f" {got:g}; {meanings.get(round(got, 4), 'follow the four layers with pen and paper')}"
    )
    x = torch.tensor([0.3, -1.2, 2.0], requires_grad=True)
    layers = [lambda x, k=k: torch.sin(x + k) + x for k in range(6)]
    in_place = "write x = x + ..., not x += ..., which overwrites an output that is still needed"
    before = x.detach().clone()
    try:
        got = answer(x, layers, torch.tensor([0.7, -0.2, 1.5], requires_grad=True))
        got.sum().backward()
    except RuntimeError as problem:
        assert "in-place" not in str(problem) and "inplace" not in str(problem), in_place
        raise AssertionError(f"gradients do not reach the input: {problem}") from None
    assert torch.equal(x, before), f"the input has changed; {in_place}"
    outputs = [x]
    for layer in layers[:3]:
        outputs.append(layer(outputs[-1]))
    expected = layers[3](outputs[3] + 0.7 * outputs[3])
    expected = layers[4](expected - 0.2 * outputs[2])
    expected = layers[5](expected + 1.5 * outputs[1])
    assert torch.allclose(got, expected, atol=1e-4), (
        f"expected {expected.tolist()} from six layers, got {got.tolist()}; the first half keeps"
        " its outputs, the second half adds them in mirrored order"
    )
    assert torch.allclose(x.grad, torch.autograd.grad(expected.sum(), x)[0], atol=1e-4), (
        "the output is right, but its gradient is not: gradients must pass through the skips too,"
        " so keep the outputs without .detach() or .data"
    )
    ours, theirs = loss_of_repeating(answer), loss_of_repeating(_no_skips)
    assert ours < theirs / 2, (
        f"expected less than half of the plain stack's loss, {theirs:.3f}, got {ours:.3f}; the"
        " skips must carry, with their gradients, what the narrow layers lose"
    )
    print(f"loss after training: {ours:.3f} with your loops, {theirs:.3f} as a plain stack")


def loss_of_repeating(stack):
    """Trains six layers to output their input; layers 1 and 4 squeeze 16 numbers through 2."""
    torch.manual_seed(0)
    layers = []
    for i in range(6):
        width = 2 if i in (1, 4) else 16
        layers.append(torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Linear(width, 16)))
    weights = torch.nn.Parameter(torch.ones(3))
    params = [weights, *(param for layer in layers for param in layer.parameters())]
    adam = torch.optim.Adam(params, lr=0.01)
    for _step in range(200):
        x = torch.randn(64, 16)
        loss = (stack(x, layers, weights) - x).square().mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
    return loss.item()


# ---- 2: paths in the record's model ----


def check_paths_of_layer_2(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected one number of paths, not {answer!r}") from None
    meanings = {
        1: "that counts only the plain stream, without any skip",
        2: "that counts the plain stream and the skip into layer 9, but layer 2's output also"
           " travels inside the outputs of layers 3, 4 and 5, which are added again",
        3: "that is the answer for eight layers; the record has twelve",
        4: "four of the added outputs contain it, and the plain stream is one path more",
        6: "that is layer 1's count; layers are numbered from 0",
        7: "that is layer 0's count, and by how much the whole stream has grown",
        64: "the stream does not double six times: each skip adds an output of the first half, and"
            " those do not grow while the second half runs",
    }
    assert abs(value - 5) < 1e-6, (
        f"expected the number of paths from layer 2's output to the last norm, got {value:g};"
        f" {meanings.get(value, 'write down which of the outputs that are added again contain it')}"
    )


# ---- 3: paths in any wiring ----


def path_counts(num_layers, skip_from):
    counts = []  # counts[k] of the stream = paths from layer k's output into it
    outputs = []
    for i in range(num_layers):
        if i in skip_from:
            earlier = outputs[skip_from[i]]
            counts = [n + (earlier[k] if k < len(earlier) else 0) for k, n in enumerate(counts)]
        counts = [*counts, 1]
        outputs.append(counts)
    return counts


def _direct_paths_only(num_layers, skip_from):
    return [1 + sum(source == k for source in skip_from.values()) for k in range(num_layers)]


def _no_skip_counted(num_layers, skip_from):
    return [1] * num_layers


def _one_list(num_layers, skip_from):
    counts, outputs = [0] * num_layers, []
    for i in range(num_layers):
        if i in skip_from:
            counts = [n + outputs[skip_from[i]][k] for k, n in enumerate(counts)]
        counts[i] += 1
        outputs.append(counts)  # the list itself, not a copy
    return counts


def _last_first(num_layers, skip_from):
    return path_counts(num_layers, skip_from)[::-1]


def check_path_counts(answer):
    wirings = [
        ("no skips", 4, {}, [1, 1, 1, 1]),
        ("one skip", 4, {3: 0}, [2, 1, 1, 1]),
        ("the record's", 12, {6 + j: 5 - j for j in range(6)}, [7, 6, 5, 4, 3, 2] + 6 * [1]),
        ("an output of the second half added again", 5, {3: 1, 4: 3}, [4, 4, 2, 2, 1]),
    ]
    for name, num_layers, skip_from, expected in wirings:
        got = answer(num_layers, dict(skip_from))
        assert isinstance(got, list | tuple | torch.Tensor) and len(got) == num_layers, (
            f"expected a list with a number of paths for each of {num_layers} layers, got {got!r}")
        got = [int(count) for count in got]
        why = ("a skip adds the whole stream behind a layer, with every contribution in it, and"
               " layer 0 comes first")
        if got == expected[::-1]:
            why = "your list is the wrong way round; layer 0 comes first"
        elif skip_from and got == [1] * num_layers:
            why = ("no skip is counted; keep the stream behind a layer, after its own contribution,"
                   " not before it")
        elif skip_from and got == _one_list(num_layers, skip_from):
            why = "later layers change a list that you keep; append a copy, list(counts)"
        assert got == expected, (
            f"expected {expected} for {name} ({num_layers} layers, {skip_from}), got {got}; {why}")


EXERCISES = {
    "1": dict(
        check=check_unet,
        hints=[
            "Which list method returns the item that was appended last?",
            "x <- f_i(x + w_j e_(n/2-1-j)) for i = n/2 + j, where e_k is layer k's output.",
            "Walk over the layers. In the second half add the popped output, weighted, before the"
            " layer. In the first half append the layer's output.",
            "for i, layer in enumerate(layers):\n    if i >= half:\n"
            "        x = x + weights[i - half] * skips.pop()\n    x = layer(x)\n"
            "    if i < half:\n        skips.append(x)",
        ],
        solution=unet,
        wrong=[_first_in_first_out, _added_after_the_layer, _inputs_kept, _weights_from_the_end,
               _in_place, _detached, _no_skips],
    ),
    "2": dict(
        check=check_paths_of_layer_2,
        hints=[
            "What layer 2 adds does not stay alone: it is part of every later output.",
            "The stream is a sum. Each skip adds the whole stream as it was after layer k, so it"
            " adds layer 2's output once more if k is 2 or later.",
            "Layers 6 to 11 add the outputs of layers 5, 4, 3, 2, 1, 0. Count which of these hold"
            " layer 2's output, and add the plain stream.",
            "The outputs of layers 5, 4, 3 and 2 hold it, those of 1 and 0 do not: 1 + 4.",
        ],
        solution=5,
        wrong=[1, 2, 3, 4, 7, 64],
    ),
    "3": dict(
        check=check_path_counts,
        hints=[
            "Let the stream be a list of counts, one per layer, and do to it what the model does.",
            "After layer i: c <- c + c_k for a skip from layer k, then c_i = 1.",
            "Keep a copy of the list after every layer. Before layer i add the copy of the layer"
            " that it takes from; then count its own output once.",
            "if i in skip_from:\n    earlier = outputs[skip_from[i]]\n"
            "    counts = [n + earlier[k] for k, n in enumerate(counts)]\n"
            "counts[i] += 1; outputs.append(list(counts))   # counts has num_layers places",
        ],
        solution=path_counts,
        wrong=[_direct_paths_only, _no_skip_counted, _one_list, _last_first],
    ),
}
