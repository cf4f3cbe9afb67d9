"""Known values of milestones: for each key of known.toml that formulas make, a function of the
milestone and of the value stated there, whose inputs it keeps and whose outputs it computes."""

import math

import torch

from oracle import mathematics as m
from oracle import schedules, table
from oracle.mathematics import tensor
from oracle.model import INPUTS, TARGETS, Model
from oracle.training import Training

# ---- small models ----


def small_loss(M, cases):
    model, found = Model(M.small()), []
    model.tied = False  # as after embedding and head have parted
    for case in cases:
        P = model.filled(case["amplitude"], case.get("moved_scalars") and M.known["moved_scalars"])
        seen = {k: v for k, v in case.items() if k not in ("amplitude", "moved_scalars", "loss")}
        with torch.no_grad():
            found.append(case | dict(loss=model.loss(P, **seen).item()))
    return found


def trained(M, steps):
    """(losses, moves) of the small training, which is run once."""
    if steps not in M.trainings:
        rates = M.known.get("small_training_rates", {})
        M.trainings[steps] = Training(M.small(**rates), steps).run()
    return M.trainings[steps]


def fp8_training(M, stated):
    rates = M.known.get("small_training_rates", {})
    training = Training(M.small(**rates), len(stated), eight_bits=True)
    training.run()
    return training.train_losses


def small_moves(M, stated):
    moves = trained(M, len(M.known["small_training"]) - 1)[1]
    return {name: moves[name].flatten()[:3].tolist() for name in stated}


def small_gradients(M, stated):
    model = Model(M.small())
    model.loss(P := model.filled(0.5)).backward()
    return {name: P[name].grad.norm().item() for name in stated}


def counted_loss(M, rows):
    """The mean loss of some rows, of which the first 5 and the first 3 targets do not count."""
    model, which = Model(M.small()), torch.ones(2, 8, dtype=torch.bool)
    which[0, :5] = which[1, :3] = False
    return model.loss(model.filled(0.5), inputs=INPUTS[rows], targets=TARGETS[rows],
                      counted=which[rows]).item()


def document_loss(M, stated):
    """Two documents in a row of 16 tokens, whose border is no target."""
    stream, which, model = INPUTS.flatten()[None].clone(), torch.arange(16) != 6, Model(M.small())
    stream[0, [0, 7]] = 1
    return model.loss(model.filled(0.5), inputs=stream, targets=TARGETS.view(1, 16),
                      counted=which[None], bos_id=1).item()


def said(M, count):
    """Logits of four tokens after 1 9 27, then the most likely tokens, one by one."""
    model, tokens, found = Model(M.small()), [1, 9, 27], []
    for _ in range(count):
        z = model.logits(model.filled(0.5), torch.tensor([tokens]))[0, -1]
        found.append(z - 30)  # as 30 tanh(logits / 30)
        tokens.append(z.argmax().item())
    return found[0][:4].tolist(), tokens[3:]


# ---- schedules ----


def changes(sizes):
    return [s for s in range(len(sizes)) if s == 0 or sizes[s] != sizes[s - 1]]


def window(M, stated):
    sizes = [schedules.window(M.record, s) for s in range(M.record.train_steps + 1)]
    found = stated | dict(changes=changes(sizes), validations=sizes[:: M.record.validate_every])
    if "sizes" in stated:
        found["sizes"] = [sizes[s] for s in found["changes"]]
        found["short"] = [size // 256 * 128 for size in found["sizes"]]
    return found


def rows(M):
    """Tokens of a training row in each step. Record #46."""
    f = M.record
    return [f.train_seq_len * (1 + min(2, schedules.stage(f, s))) for s in range(f.train_steps)]


def stages(M, stated):
    tokens = rows(M)
    return dict(changes=changes(tokens), rows=[tokens[s] for s in changes(tokens)])


def target_weights(M, stated):
    f = M.record.but(**stated["run"])
    return stated | dict(total=sum(schedules.target_weights(f, 0)),
                         steps=[[s, schedules.target_weights(f, s)] for s, _ in stated["steps"]])


# ---- layers and losses ----


def rotary(M, cases):
    found = []
    for case in cases:
        D, entries = case["head_dim"], case.get("entries", [*range(case["head_dim"])])
        x = tensor(case.get("vector", [j / D for j in range(D)])).view(1, 1, 1, D)
        turns = m.frequencies(D, M.record.half_rotation)
        found.append(case | dict(turned=[
            [t, m.rotate(x, turns, torch.tensor([t]))[0, 0, 0, entries].tolist()]
            for t, _ in case["turned"]]))
    return found


def yarn(M, stated):
    windows, turns = schedules.stage_windows(M.record), m.frequencies(128, True)[stated["pairs"]]
    found = [m.yarn(turns, windows[: k + 1]) for k in range(len(windows))]
    return stated | dict(
        windows=[[w, scale, t.tolist()] for w, (t, scale) in zip(windows, found, strict=True)],
        jump=m.yarn(turns, windows[:: len(windows) - 1])[0].tolist())


def attention(M, stated):
    q, k, v = (tensor(stated[name]).reshape(1, 6, 1, -1) for name in "qkv")
    documents = (torch.arange(6)[None] >= stated["starts"][1]).long()
    return stated | dict(cases=[
        [w, scale, m.attend(q, k, v, scale, m.visible_keys(documents, w)).flatten().tolist()]
        for w, scale, _ in stated["cases"]])


def bigrams(M, stated):
    tokens, f = torch.tensor([stated["tokens"]]), M.record
    signs = dict(sign_rows=m.sign_rows(tokens, f.sign_rows)[0].tolist()) if f.signs else {}
    return stated | dict(rows=m.bigram_rows(tokens, f.bigram_rows)[0].tolist()) | signs


def capped(M, z):
    f = M.record
    return m.cap(z, *((f.cap_height, f.cap_shift, f.cap_width) if f.cap == "stated" else f.cap))


def toy(M, stated):
    z = tensor(stated["logits"])[None].requires_grad_()
    losses = m.token_losses(capped(M, z), torch.tensor([stated["targets"]]), stated["weights"])
    losses.sum().backward()
    return stated | dict(losses=losses[0].tolist(), gradients=z.grad[0].tolist())


def prefix_toy(M, stated):
    z, (target, prefix) = tensor(stated["logits"])[None, None].requires_grad_(), stated["targets"]
    loss = m.token_losses(capped(M, z), torch.tensor([[target]]), stated["weights"],
                          torch.full((4,), prefix)).sum()
    loss.backward()
    return stated | dict(loss=loss.item(), gradient=z.grad[0, 0].tolist())


# ---- optimizers ----


def orthogonalized(M, stated):
    def found(matrix, size=1):
        return m.orthogonalize(size * tensor(matrix), M.record.polar).tolist()

    pairs = [pair | dict(output=found(pair["input"])) for pair in stated["pairs"]]
    return stated | dict(
        pairs=pairs, singular_values=torch.linalg.svdvals(tensor(pairs[0]["output"])).tolist(),
        scalars=[[s, found([[s, 0], [0, math.sqrt(1 - s * s)]], 1e6)[0][0]]  # without the epsilon
                 for s, _ in stated["scalars"]])


def exchange(M, cases):
    training = Training(M.small(), 0)
    return [case | dict(update=(training.factor("", g := tensor(case["gradient"]))
                                * m.orthogonalize(g, M.record.polar)).tolist()) for case in cases]


def adam(M, stated):
    cases = []
    for eps, _ in stated["cases"]:
        p, state, path = tensor(0.0), {}, []
        for g in stated["gradients"]:
            p = m.adam(p, tensor(g), state, stated["rate"], stated["betas"], eps, early=True)
            path.append(p.item())
        cases.append([eps, path])
    return stated | dict(cases=cases)


def even_out(M, stated):
    means, found = 0, []
    for update in stated["updates"]:  # whose neurons are rows
        V, means = m.even_out(tensor(update), means, 0.95, 1)
        found.append((means[:, 0].tolist(), V.tolist()))
    return stated | dict(mean_squares=[a for a, _ in found], evened=[b for _, b in found])


MAKERS = dict(
    small_loss=small_loss, small_windows=small_loss, small_moves=small_moves,
    small_training=lambda M, stated: trained(M, len(stated) - 1)[0],
    small_training_end=lambda M, stated: trained(M, 20)[0][-1], small_gradients=small_gradients,
    fp8_training=fp8_training,
    row_losses=lambda M, stated: [counted_loss(M, [0]), counted_loss(M, [1])],
    first_logits=lambda M, stated: said(M, 1)[0], greedy=lambda M, stated: said(M, len(stated))[1],
    counted_loss=lambda M, stated: counted_loss(M, [0, 1]), document_loss=document_loss,
    learning_rate=lambda M, stated: [[s, schedules.lr_multiplier(M.record, s)] for s, _ in stated],
    momentum=lambda M, stated: [[s, schedules.muon_momentum(M.record, s)] for s, _ in stated],
    window=window, stages=stages,
    tokens=lambda M, stated: 8 * sum(rows(M)), target_weights=target_weights,
    tied=lambda M, stated: dict(last_step=schedules.last_tied_step(M.record)), rotary=rotary,
    yarn=yarn, attention=attention, bigrams=bigrams, toy=toy, prefix_toy=prefix_toy,
    cap=lambda M, stated: stated | dict(
        capped=[[z, capped(M, tensor(z)).item()] for z, _ in stated["capped"]]),
    orthogonalized=orthogonalized, exchange=exchange, adam=adam, even_out=even_out,
    cautious_update=lambda M, stated: stated | dict(updated=m.cautious(
        tensor(stated["weights"]), tensor(stated["updates"]), stated["rate"],
        stated["decay"]).tolist()))


def keys(M):
    """Those of MAKERS that a milestone states, and those of its small model and schedules, which
    hold for it where it states none."""
    always = {key for key in MAKERS if key.startswith("small_")} | {
        "learning_rate", "momentum", "fp8_training"}
    return [key for key in MAKERS if M.features and key not in table.elsewhere(M.chain)
            and (key in M.own or key in always and key in M.known)]
