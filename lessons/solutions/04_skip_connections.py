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


def _detached_weights(x, layers, weights):
    return unet(x, layers, torch.as_tensor(weights).detach())


def _detached_input(x, layers, weights):
    return unet(x.detach(), layers, weights)


def _weights_made_positive(x, layers, weights):
    return unet(x, layers, [abs(weight) for weight in weights])


def _layers_run_again(x, layers, weights):
    half, stream = len(layers) // 2, x
    for i, layer in enumerate(layers):
        if i >= half:
            skip = x
            for early in layers[: 2 * half - i]:
                skip = early(skip)
            stream = stream + weights[i - half] * skip
        stream = layer(stream)
    return stream


def _empties_the_list(x, layers, weights):
    skips = []
    while len(layers) > len(weights):
        x = layers.pop(0)(x)
        skips.append(x)
    for weight in weights:
        x = layers.pop(0)(x + weight * skips.pop())
    return x


def _six_layers_at_most(x, layers, weights):
    skips, half = [], len(layers) // 2
    for layer in layers[:half]:
        x = layer(x)
        skips.append(x)
    for i, layer in enumerate(layers[half:]):
        x = layer(x + weights[min(i, 2)] * skips[-1 - i])
    return x


def _mean(x, layers, weights):
    skips, half = [], len(layers) // 2
    for layer in layers[:half]:
        x = layer(x)
        skips.append(x)
    for layer, weight in zip(layers[half:], weights, strict=True):
        x = layer((x + weight * skips.pop()) / 2)
    return x


def _outer_layers_first(x, layers, weights):
    """A right answer: the layers between the outermost two are a U-net too."""
    if not layers:
        return x
    early = layers[0](x)
    return layers[-1](_outer_layers_first(early, layers[1:-1], weights[:-1]) + weights[-1] * early)


def check_unet(answer):
    assert callable(answer), f"a function is expected, not {answer!r}"
    layers = [lambda x: x + 1, lambda x: 2 * x, lambda x: 3 * x, lambda x: x + 10]
    meanings = {
        37: "the order is first in, first out; the last output must be added first",
        30: "each skip is added after its layer; add it to the layer's input",
        28: "you keep the inputs of the first layers, or not two outputs; keep the outputs of the"
            " first len(layers) // 2 layers",
        36: "the weights are not used",
        59: "the weights are used from the end; weights[0] is for the second half's first layer",
        22: "no skip is added",
        16: "the skips replace the stream; add them to it",
    }
    got = answer(torch.tensor(1.0), list(layers), [0.5, 3.0])
    assert got is not None, "the function returns nothing; return the last layer's output"
    assert torch.is_tensor(got) and got.shape == (), (
        f"expected a tensor like the last layer's output, got {got!r}")
    got = float(got)
    assert abs(got - 34) < 1e-4, (
        "expected 34 from the layers x + 1, 2x, 3x, x + 10 with weights 0.5 and 3 at x = 1, got"
        f" {got:g}; {meanings.get(round(got, 4), 'follow the four layers with pen and paper')}"
    )
    for num_layers in (2, 6, 10):
        check_layers(answer, num_layers)
    ours, theirs = loss_of_repeating(answer), loss_of_repeating(_no_skips)
    assert ours < theirs / 2, (
        f"expected less than half of the plain stack's loss, {theirs:.3f}, got {ours:.3f}; the"
        " skips must carry, with their gradients, what the narrow layers lose"
    )
    print(f"loss after training: {ours:.3f} with your loops, {theirs:.3f} as a plain stack")


def _rounded(tensor):
    return [round(number, 3) for number in tensor.flatten().tolist()]


def check_layers(answer, num_layers):
    """The output of num_layers layers, its gradients, and that each layer runs once."""
    calls = []

    def layer_number(k):
        def layer(x):
            calls.append(k)
            return torch.sin(x + k) + x / 2

        return layer

    layers = [layer_number(k) for k in range(num_layers)]
    x = torch.tensor([0.3, -1.2, 2.0], requires_grad=True)
    weights = torch.tensor([0.7, -0.2, 1.5, -1.1, 0.4][: num_layers // 2], requires_grad=True)
    wanted = unet(x, layers, weights)
    of_x, of_weights = torch.autograd.grad(wanted.sum(), (x, weights))
    calls.clear()
    given, before = list(layers), x.detach().clone()
    in_place = "write x = x + ..., not x += ..., which overwrites an output that is still needed"
    try:
        got = answer(x, given, weights)
        assert torch.equal(x, before), f"the input has changed; {in_place}"
        assert given == layers, (
            f"your function takes layers out of the caller's list ({len(given)} of {num_layers} are"
            " left), so a model could run only once; go over the list and leave it as it is")
        assert torch.allclose(got, wanted, atol=1e-4), (
            f"expected {_rounded(wanted)} from {num_layers} layers with weights"
            f" {_rounded(weights)}, got {_rounded(got)}; the first half keeps its outputs, the"
            " second half adds them in mirrored order, each with its own weight, which may be"
            " negative")
        assert calls == list(range(num_layers)), (
            f"the layers run in the order {calls}; each should run once, in order, so keep the"
            " first half's outputs instead of computing them again")
        assert got.requires_grad, (
            "the output has no gradient; keep x and the outputs without .detach() or .data")
        for name, into, right in (("input", x, of_x), ("weights", weights, of_weights)):
            (found,) = torch.autograd.grad(got.sum(), into, retain_graph=True, allow_unused=True)
            assert found is not None, (
                f"no gradient reaches the {name}, so {GRADIENTS[name]}")
            assert torch.allclose(found, right, atol=1e-4), (
                f"the output is right, but its gradient for the {name} is not: gradients must pass"
                " through the skips too, so keep the outputs without .detach() or .data")
    except RuntimeError as problem:
        if "in-place" in str(problem) or "inplace" in str(problem):
            raise AssertionError(in_place) from None
        raise


GRADIENTS = {
    "input": "the layers before could never learn; begin with x itself, not with x.detach()",
    "weights": "they would never learn; multiply by weights[j] itself, not by a float, .item(),"
               " .data or .detach() of it",
}


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

LAYERS, PATHS = (1, 4, 8), (6, 3, 1)


def check_paths(answer):
    try:
        values = tuple(float(number) for number in answer)
        assert len(values) == 3 and not isinstance(answer, set | str)
    except (TypeError, ValueError, AssertionError):
        raise AssertionError("expected three numbers, (paths from layer 1, from layer 4, from"
                             f" layer 8), not {answer!r}") from None
    whole = {
        (1, 3, 6): "the order is layer 1, layer 4, layer 8",
        (1, 1, 1): "that counts only the plain stream, without any skip",
        (2, 2, 1): "that counts the plain stream and the skip from the layer itself; but layer 1's"
                   " contribution also travels inside the outputs of layers 2 to 5, which are added"
                   " again",
        (4, 1, 1): "that is for eight layers; the record has twelve",
        (5, 2, 1): "layers are numbered from 0",
        (7, 4, 1): "layers are numbered from 0",
        (5, 2, 0): "the plain stream is one path more",
        (32, 4, 1): "the stream does not double with each skip: a skip adds an output of the first"
                    " half, and those do not grow while the second half runs",
    }
    if values == PATHS:
        return
    why = whole.get(values)
    for layer, value, right in zip(LAYERS, values, PATHS, strict=True):
        if not why and value != right:
            why = (f"layer {layer}'s is wrong: write down which of the outputs that are added again"
                   " contain its contribution" if layer < 6 else
                   f"layer {layer}'s is wrong: does any skip begin in the second half?")
    raise AssertionError(
        f"{', '.join(f'{value:g}' for value in values)} are not the paths from layers 1, 4 and 8:"
        f" {why}")


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


def _in_the_order_given(num_layers, skip_from):
    counts = [1] * num_layers
    for source in skip_from.values():
        counts = [n + (k <= source) for k, n in enumerate(counts)]
    return counts


def _first_half_only(num_layers, skip_from):
    return path_counts(num_layers, {to: k for to, k in skip_from.items() if k < num_layers // 2})


def _each_output_once(num_layers, skip_from):
    taken = {}
    for layer, source in skip_from.items():
        if source not in taken.values():
            taken[layer] = source
    return path_counts(num_layers, taken)


def _empties_the_wiring(num_layers, skip_from):
    kept = {layer: skip_from.pop(layer) for layer in list(skip_from)}
    return path_counts(num_layers, kept)


def _a_half_more(num_layers, skip_from):
    return [count + 0.5 for count in path_counts(num_layers, skip_from)]


def _doubled_by_every_skip(num_layers, skip_from):
    return [2 ** sum(source >= k for source in skip_from.values()) for k in range(num_layers)]


def _from_the_head(num_layers, skip_from):
    """A right answer: walks from a layer's output towards the head, over all ways."""
    def ways(layer):
        onward = ways(layer + 1) if layer + 1 < num_layers else 1
        return onward + sum(ways(to) for to, source in skip_from.items() if source == layer)

    return torch.tensor([ways(layer) for layer in range(num_layers)])


WIRINGS = [  # name, layers, {layer: the earlier layer that it takes from}, paths
    ("no skips", 4, {}, [1, 1, 1, 1]),
    ("one layer", 1, {}, [1]),
    ("one skip", 4, {3: 0}, [2, 1, 1, 1]),
    ("the record's", 12, {6 + j: 5 - j for j in range(6)}, [7, 6, 5, 4, 3, 2] + 6 * [1]),
    ("an output that two layers take", 5, {4: 1, 3: 1}, [3, 3, 1, 1, 1]),
    ("an output of the second half added again", 5, {3: 1, 4: 3}, [4, 4, 2, 2, 1]),
    ("the same, listed from the end", 5, {4: 3, 3: 1}, [4, 4, 2, 2, 1]),
    ("layers that take the previous output twice", 4, {1: 0, 2: 1, 3: 2}, [8, 4, 2, 1]),
]


def check_path_counts(answer):
    assert callable(answer), f"a function is expected, not {answer!r}"
    for name, num_layers, skip_from, expected in WIRINGS:
        given = dict(skip_from)
        got = answer(num_layers, given)
        assert given == skip_from, (
            f"your function changes the dictionary that it gets: {skip_from} became {given}")
        assert isinstance(got, list | tuple | torch.Tensor) and len(got) == num_layers, (
            f"expected a list with a number of paths for each of {num_layers} layers, got {got!r}")
        got = [float(count) for count in got]
        assert all(map(float.is_integer, got)), f"paths are whole numbers, yours are {got}"
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
        elif got == _each_output_once(num_layers, skip_from):
            why = "several layers may take the same output; each of them adds it"
        elif got == _first_half_only(num_layers, skip_from):
            why = "an output of the second half can be taken too, with what skips added to it"
        elif got == _in_the_order_given(num_layers, skip_from):
            why = ("a skip can carry what an earlier skip brought, so it adds the number of paths"
                   " so far, not 1; go through the layers in order")
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
               _in_place, _detached, _no_skips, _detached_weights, _detached_input,
               _weights_made_positive, _layers_run_again, _empties_the_list, _six_layers_at_most,
               _mean],
        right=[_outer_layers_first],
    ),
    "2": dict(
        check=check_paths,
        hints=[
            "What layer 1 adds does not stay alone: it is part of every later output.",
            "The stream is a sum. Each skip adds the whole stream as it was after layer k, so it"
            " adds layer 1's contribution once more if k is 1 or later.",
            "Layers 6 to 11 add the outputs of layers 5, 4, 3, 2, 1, 0. Count which of these hold"
            " the layer's contribution, and add the plain stream.",
            "The outputs of layers 5, 4, 3, 2 and 1 hold layer 1's, that of 0 does not: 1 + 5."
            " Those of 5 and 4 hold layer 4's: 1 + 2. None holds layer 8's.",
        ],
        solution=PATHS,
        wrong=[(1, 3, 6), (1, 1, 1), (2, 2, 1), (4, 1, 1), (5, 2, 1), (5, 2, 0), (32, 4, 1),
               (6, 3, 2), (6, 4, 1), {1, 3, 6}, "631", 6],
        right=[[6, 3, 1], torch.tensor(PATHS)],
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
        wrong=[_direct_paths_only, _no_skip_counted, _one_list, _last_first, _in_the_order_given,
               _first_half_only, _each_output_once, _empties_the_wiring, _a_half_more,
               _doubled_by_every_skip],
        right=[_from_the_head],
    ),
}
