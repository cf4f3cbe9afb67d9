"""The interactive figures: which milestones have them, and the values of their still pictures.

A figure is a template and a script of one name in site/figures/. The template draws the still
picture from what a function of that name returns here. The script follows the controls; when it
starts, it changes nothing. `own` is what the script is given: what was read from the snapshots.
"""

import ast
import math
from collections.abc import Iterable
from functools import cache
from itertools import count, islice, product
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from speedrun.diff.origin import read_script
from speedrun.history.blocks import split_blocks
from speedrun.history.fields import default_hyperparameters
from speedrun.history.handles import handles_of
from speedrun.history.manifest import Manifest, Milestone
from speedrun.history.tokens import step_tokens

PLACES = {  # {figure: slugs of the milestones that show it, each with its lesson}
    "newton_schulz": ("muon", "polar_express"),
    "document_tiles": ("flex_attention", "tile_mask", "staged_windows", "flash_attention_3"),
    "schedules": ("batch_schedule", "multi_token"),
    "eight_lanes": ("distributed_muon", "overlapped_muon", "sharded_adam",
                    "gradient_communication"),
    "number_formats": ("fp8_head", "bfloat16_weights", "fp8_loss", "fp8_mlp"),
}


def figures_of(manifest: Manifest, milestones: Iterable[Milestone]) -> dict[str, dict]:
    """{name: values of the still picture} of the figures of these milestones. A manifest that lacks
    a milestone of a figure does not have the figure."""
    slugs, shown = ({m.slug for m in some} for some in (manifest.milestones, milestones))
    return {name: still(manifest, name, next(place for place in places if place in shown))
            for name, places in PLACES.items() if shown & set(places) and set(places) <= slugs}


def still(manifest: Manifest, name: str, at: str | None = None) -> dict:
    """The values of the still picture of a figure, all of whose milestones are in the manifest, on
    the page of the milestone with the slug `at`; by default on the page of its first."""
    at = manifest.get(at or PLACES[name][0])
    return globals()[name](manifest, at, *map(manifest.get, PLACES[name]))


# ---- Newton-Schulz

VALUES = 16
LOW, HIGH = 0.68, 1.2  # where 01's five rounds end, as its docstring says


def newton_schulz(
    _: Manifest, __: Milestone, muon: Milestone, polar_express: Milestone
) -> dict:
    """Singular values before and after the rounds of a cubic, of 01's and of 08f's polynomials."""
    count, power, [quintic], [polar] = 5, -3, _literals(muon, "newton_schulz"), _literals(
        polar_express, "POLAR_EXPRESS")
    methods = [
        {"name": "Cubic", "polynomials": [(1.5, -0.5, 0)], "margin": 1, "repeats": True,
         "products": 2},
        {"name": f"Quintic ({muon.id})", "polynomials": [quintic], "margin": 1, "repeats": True,
         "products": 3},
        {"name": f"Polar Express ({polar_express.id})", "polynomials": polar, "margin": 1.02,
         "repeats": False, "products": 3}]
    before = [10 ** (power * i / (VALUES - 1)) for i in range(VALUES)]
    before = [v / math.hypot(*before) for v in before]
    tracks, says = [], []
    for method, look in zip(methods, ("dots", "key", "dashes"), strict=True):
        after = [rounds(method, v, count) for v in before]
        inside = sum(LOW <= round(v, 2) <= HIGH for v in after)
        area = " to ".join(f"{v:#.2g}" if v < 0.1 else f"{v:.2f}" for v in (min(after), max(after)))
        curve = [10 ** (i / 96 - 4) for i in range(385)]
        tracks.append({
            "name": method["name"], "look": look, "dots": [f"{_track_x(v):.1f}" for v in after],
            "result": f"{inside} of {VALUES} in the band · {area} · "
                      f"{count * method['products']} products",
            "curve": " ".join(f"{_map_x(v):.1f},{_map_y(rounds(method, v, count)):.1f}"
                              for v in curve)})
        says.append(f"{method['name']} {inside} ({area})")
    ticks = (1e-4, "0.0001"), (1e-3, "0.001"), (0.01, "0.01"), (0.1, "0.1"), (1, "1")
    return {
        "own": methods, "count": count, "power": power, "ratio": f"{10**power:.2g}",
        "tracks": tracks, "one": f"{_track_x(1):.1f}",
        "band": (f"{_track_x(LOW):.1f}", f"{_track_x(HIGH) - _track_x(LOW):.1f}"),
        "map_band": (f"{_map_y(HIGH):.1f}", f"{_map_y(LOW) - _map_y(HIGH):.1f}"),
        "x_ticks": [(f"{_track_x(v):.1f}", label) for v, label in ticks],
        "map_x_ticks": [(f"{_map_x(v):.1f}", label) for v, label in ticks],
        "map_y_ticks": [(round(_map_y(v)), v) for v in (0, 1, 2)],
        "says": f"After {count} rounds, of {VALUES} values in the band: {'; '.join(says)}."}


def rounds(method: dict, value: float, count: int) -> float:
    """A singular value of a matrix of Frobenius norm 1 after `count` rounds of a method."""
    value /= method["margin"]
    for i in range(count if method["repeats"] else min(count, len(method["polynomials"]))):
        a, b, c = method["polynomials"][i % len(method["polynomials"])]
        value *= a + b * value**2 + c * value**4
    return value


def _track_x(v):
    return 20 + (math.log10(max(v, 1e-4)) + 4) / (math.log10(2.1) + 4) * 392


def _map_x(v):
    return 28 + (math.log10(v) + 4) / 4 * 384


def _map_y(v):
    return 252 - v / 2.1 * 238


# ---- documents, windows, tiles

TOKENS, CELL = 32, 12  # of the model of a mask; pixels of a pair
TILES_LEFT, TILES_TOP = 8, 24


def document_tiles(_: Manifest, __: Milestone, *milestones: Milestone) -> dict:
    """A model of the mask of four milestones, drawn as the first of them has it: pairs of tokens
    that are seen, and the tiles that hold them."""
    starts, window, tile = (0, 9, 22), 12, 4
    count, size, end = TOKENS // tile, tile * CELL, TOKENS * CELL
    seen = {q: [k for k in range(q + 1) if q - k < window
                and not any(k < start <= q for start in starts)] for q in range(TOKENS)}
    pairs, paths = sum(map(len, seen.values())), {"full": [], "partial": []}
    for q, k in product(range(count), repeat=2):
        inside = sum(key // tile == k for query in range(q * tile, (q + 1) * tile)
                     for key in seen[query])
        if inside:
            paths["full" if inside == tile**2 else "partial"].append(
                f"M{TILES_LEFT + k * size} {TILES_TOP + q * size}h{size}v{size}h-{size}z")
    some = sum(map(len, paths.values()))
    cross = f"M{TILES_LEFT} {{}}h{end}M{{}} {TILES_TOP}v{end}"

    def lines(places):
        return "".join(cross.format(TILES_TOP + place, TILES_LEFT + place) for place in places)

    return {
        "own": [m.id for m in milestones], "modes": [f"{m.id} {m.title}" for m in milestones],
        "tokens": f"{default_hyperparameters(milestones[0].script)['seq_len']:,}",
        "starts": starts, "window": window, "tile": tile,
        "partial": "".join(paths["partial"]), "full": "".join(paths["full"]),
        "grid": lines(range(0, end + 1, size)),
        "documents": lines(start * CELL for start in starts[1:]),
        "pairs": "".join(f"M{TILES_LEFT + keys[0] * CELL + 4} {TILES_TOP + q * CELL + 6}"
                         f"h{len(keys) * CELL}" for q, keys in seen.items()),
        "says": f"{milestones[0].id}: {pairs} pairs are seen. {some} of {count**2} tiles are "
                f"computed, {len(paths['full'])} of them without applying the rule; "
                f"{round(100 - 100 * pairs / (some * tile**2))}% of their pairs are not seen. "
                f"Finding the tiles takes {TOKENS**2:,} tests, one for each pair of tokens."}


# ---- schedules

PANELS = {"rate": "Learning rate", "momentum": "Muon's momentum", "window": "Window, tokens",
          "tokens": "Tokens per step", "targets": "Further targets: weight in the loss"}


def schedules(manifest: Manifest, at: Milestone, *_: Milestone) -> dict:
    """The schedules of all milestones of a chain; drawn: those of `at` and of its parent."""
    chain = manifest.of_chain(at.chain).milestones
    own, step = [schedules_of(m) for m in chain], 800
    pair = [chain.index(manifest.get(at.parent)), chain.index(at)]
    two = [own[i] for i in pair]
    longest, panels, now = max(m["steps"] for m in two), [], {}
    for name, title in PANELS.items():
        shown = [m[name] or [] for m in two]
        top = max((v for schedule in shown for v in schedule[1::2]), default=None)
        bottom, form = 0.8 if name == "momentum" else 0, FORMS[name]
        now[name] = [form.format(value_at(it, step)) if it else "none" for it in shown]
        panels.append({
            "title": title, "bottom": bottom,
            "now": [f"{m['id']} {text}" for m, text in zip(two, now[name], strict=True)],
            "top": form.format(top) if top and top > bottom else "", "last": f"{longest:,}",
            "scrub": f"M{58 + step / longest * 238:.1f} 34V120",
            "lines": [" ".join(
                f"{58 + at / longest * 238:.1f},{116 - (v - bottom) / (top - bottom or 1) * 76:.1f}"
                for at, v in zip(it[::2], it[1::2], strict=True)) for it in shown]})
    words = [f"{m['id']} has read {tokens / 1e6:.0f}M tokens; rate {now['rate'][i]}, momentum "
             f"{now['momentum'][i]}, window {now['window'][i]}, {now['tokens'][i]} tokens per "
             f"step, further targets {now['targets'][i]}." for i, m in enumerate(two)
             for tokens in [sum(value_at(m["tokens"], before) for before in range(step))]]
    return {"own": own, "first": pair[0], "second": pair[1], "step": step, "longest": longest,
            "panels": panels, "says": f"Step {step}: {' '.join(words)}"}


FORMS = {"rate": "{:.2f}", "momentum": "{:.3f}", "window": "{:,.0f}", "tokens": "{:,.0f}",
         "targets": "{:.2f}"}


@cache
def schedules_of(m: Milestone) -> dict:
    """A milestone's number of steps and its schedules, each as straight pieces: [first step, value,
    last step, value, ...]; None for one that it lacks. Its section Schedules is run alone."""
    defaults, handles = default_hyperparameters(m.script), handles_of(m)
    args, known = SimpleNamespace(**defaults), {"math": math, "NamedTuple": NamedTuple}
    exec(compile(_section(m, "Schedules"), m.script, "exec"), known)
    module, every = SimpleNamespace(**known), range(args.train_steps)
    values = {
        "rate": [module.lr_multiplier(step, args) for step in every],
        "momentum": [handles.momentum(module, step, args) for step in every],
        "window": [next(iter(handles.window_at(module, step, args)), None) for step in every],
        "tokens": list(islice(step_tokens(defaults), args.train_steps)),
        "targets": [sum(handles.target_weights(module, step, args)) - 1 for step in every]}
    return {"id": m.id, "name": f"{m.id} {m.title}", "steps": args.train_steps,
            **{name: pieces(found) for name, found in values.items()}}


def pieces(values: list[float | None]) -> list[float] | None:
    """The straight pieces of a list of values: [first place, value, last place, value, ...]."""
    if values[0] is None:
        return None
    found, start = [], 0
    for i in range(1, len(values) + 1):
        slope = values[start + 1] - values[start] if i > start + 1 else 0
        if i == len(values) or i > start + 1 and not math.isclose(
                values[i], values[start] + slope * (i - start), rel_tol=1e-7, abs_tol=1e-7):
            found += [start, _short(values[start]), i - 1, _short(values[i - 1])]
            start = i
    return found


def _short(value):
    """A value in seven digits; a whole one without a point, as a page holds hundreds."""
    value = float(f"{value:.7g}")
    return int(value) if value.is_integer() else value


def value_at(schedule: list[float], step: int) -> float:
    """The value at a step of a schedule in straight pieces."""
    first, before, last, after = next(p for p in zip(*[iter(schedule)] * 4, strict=True)
                                      if step <= p[2])
    return before + (0 if first == last else (after - before) * (step - first) / (last - first))


# ---- eight lanes

RANKS, WIDTH, VOCAB, TABLE_MS = 8, 768, 50304, 0.4  # 02's sizes; the model's time for its embedding
ALL_REDUCE, ONE_WAY = 2 * (RANKS - 1) / RANKS, (RANKS - 1) / RANKS  # what a rank sends of a tensor
KINDS = "tables", "matrices", "grads", "results", "padding"


def eight_lanes(
    manifest: Manifest, at: Milestone, distributed_muon: Milestone, *others: Milestone
) -> dict:
    """A model of an optimizer step, as the parent of the first of these milestones has it and as
    they have it: what each rank computes and what is sent when."""
    milestones = [manifest.get(distributed_muon.parent), distributed_muon, *others]
    mode, link, work, layers = milestones.index(at), 150, 1, 12
    every = [simulate(plan(i, layers), link, work / 10) for i in range(len(milestones))]
    total, bars, sent, idle = every[mode]
    most = max(run[0] for run in every)
    paths = dict.fromkeys(KINDS, "")

    def x(ms):
        return f"{48 + ms / most * 364:.1f}"

    for kind, rank, start, end in bars:
        top, height = (11, 7) if rank < 0 else (0, 11)
        for row in range(RANKS) if rank < 0 else [rank] if end > start else []:
            paths[KINDS[kind]] += f"M{x(start)} {4 + 25 * row + top}H{x(end)}v{height}H{x(start)}z"
    ids = [m.id for m in milestones]
    totals = ", ".join(f"{id} {run[0]:.1f} ms" for id, run in zip(ids, every, strict=True))
    return {"own": ids, "modes": [f"{m.id} {m.title}" for m in milestones], "mode": mode,
            "link": link, "work": work, "layers": layers, "most": f"{most:.1f}",
            "rows": [4 + 25 * row for row in range(RANKS)], "paths": paths.items(),
            "says": f"{ids[mode]}: the step takes {total:.1f} ms. Each GPU sends "
                    f"{sent / 1e6:.0f} MB; on average it updates no weights in {100 * idle:.0f}% "
                    f"of the time. With the same settings: {totals}."}


def plan(mode: int, layers: int, width: int = WIDTH, vocab: int = VOCAB) -> list[tuple]:
    """What a step does: ("compute", kind, units of each rank), ("send", kind, bytes) or ("wait",
    number of the send). A square matrix is 1 unit, one of the MLP 3; the embedding has its own."""
    steps, sends = [], count()
    sizes = (4 * layers, width**2, 1), (2 * layers, 4 * width**2, 3)
    table, matrices = 4 * vocab * width, sum(number * size for number, size, _ in sizes)

    def send(kind, size):
        steps.append(("send", kind, size))
        return next(sends)

    def wait(*which):
        steps.extend(("wait", i) for i in which)

    def compute(kind, units):
        steps.append(("compute", kind, units))

    if mode < 3:  # all gradients to all
        wait(send(2, ALL_REDUCE * table), send(2, ALL_REDUCE * 4 * matrices))
        compute(0, [1] * RANKS)
    else:  # a rank gets and updates its rows of the embedding
        wait(send(2, ONE_WAY * table))
        compute(0, [1 / RANKS] * RANKS)
        wait(send(3, ONE_WAY * table))
    if mode == 3:
        wait(send(2, ALL_REDUCE * 4 * matrices))
    if mode == 0:
        compute(1, [10 * layers] * RANKS)
    if mode == 1:  # matrix i belongs to rank i mod 8; a layer has four small ones, then two large
        compute(1, [sum(1 if i % 6 < 4 else 3 for i in range(rank, 6 * layers, RANKS))
                    for rank in range(RANKS)])
        wait(send(3, ALL_REDUCE * 2 * matrices))
    if mode < 2:
        return steps
    shares = [-(-number // RANKS) for number, _, _ in sizes]
    scatters = [send(2, ONE_WAY * 4 * RANKS * share * size)
                for share, (_, size, _) in zip(shares, sizes, strict=True) if mode == 4]
    gathers = []
    for i, (share, (number, size, units)) in enumerate(zip(shares, sizes, strict=True)):
        wait(*scatters[i : i + 1])
        own = [max(0, min(share, number - rank * share)) for rank in range(RANKS)]
        compute(1, [units * n for n in own])
        if mode == 4:  # 07 pads with zeros, which cost as much as matrices: no weights
            compute(4, [units * (share - n) for n in own])
        gathers.append(send(3, ONE_WAY * (4 if mode == 4 else 2) * RANKS * share * size))
    wait(*gathers)
    return steps


def simulate(steps: list[tuple], link: float, unit: float) -> tuple[float, list, float, float]:
    """(total, bars, bytes that a rank sends, idle share) of a plan, in ms; a bar is (kind, rank or
    -1 for all, start, end), and padding counts as idle. link: GB per second that a rank sends;
    unit: ms of a square matrix."""
    clocks, ends, bars, free, sent, busy = [0.0] * RANKS, [], [], 0.0, 0.0, 0.0
    for what, kind, *amount in steps:
        if what == "send":  # it starts when all ranks have come to it and the link is free
            start = max(free, *clocks)
            free, sent = start + amount[0] / link / 1e6, sent + amount[0]
            ends.append(free)
            bars.append((kind, -1, start, free))
        for rank, clock in enumerate(clocks):
            if what == "wait":
                clocks[rank] = max(clock, ends[kind])
            elif what == "compute":
                clocks[rank] += amount[0][rank] * (unit if kind else TABLE_MS)
                busy += clocks[rank] - clock if kind != 4 else 0
                bars.append((kind, rank, clock, clocks[rank]))
    return max(clocks), bars, sent, 1 - busy / RANKS / max(clocks)


# ---- number formats

FORMATS = {"e4m3": (3, -6, 448), "e5m2": (2, -14, 57344)}  # mantissa bits, least exponent, largest
FP8 = {"inputs": ("fp8_x_scale", "e4m3"), "weights": ("fp8_weight_scale", "e4m3"),
       "logits' gradients": ("fp8_grad_scale", "e5m2")}


def number_formats(
    _: Manifest, __: Milestone, fp8_head: Milestone, ___: Milestone, fp8_loss: Milestone,
    fp8_mlp: Milestone
) -> dict:
    """The error of numbers in FP8 with the snapshots' scales, and the bits of a weight that takes
    many small updates: in float32, in bfloat16, and in bfloat16 with the lower 16 bits."""
    own = [{"name": f"{m.id}, {name} ({form})", "format": form,
            "scale": default_hyperparameters(m.script)[scale]}
           for m in (fp8_head, fp8_loss) for name, (scale, form) in FP8.items()]
    own.append({"name": f"{fp8_mlp.id}, activations up to 1 (e4m3)", "format": "e4m3",
                "scale": 448.0})
    power, step, count = 0.5, -4, 100
    number, scale, form = float(np.float32(10**power)), own[0]["scale"], own[0]["format"]
    mantissa, lowest, largest = FORMATS[form]
    curve, weights = [], updated(10**step, count)
    for v in (float(np.float32(10 ** (i / 20 - 9))) for i in range(281)):
        error = abs(quantize(v, scale, form) / scale / v - 1)
        curve.append(f"{_number_x(v)},{210 - 180 * error:.1f}")
    kept = quantize(number, scale, form)
    error = abs(kept / scale / number - 1)
    names = "float32", "bfloat16 alone, rounded", "bfloat16 and remainder (12)"
    return {
        "own": own, "power": power, "number": _size(number), "scale": _size(scale), "small": step,
        "count": count, "step": _size(10**step), "curve": " ".join(curve),
        "place": f"M{_number_x(number)} 24V214",
        "range": f"full precision: {_size(2**lowest / scale)} to {_size(largest / scale)}; "
                 f"0 below {_size(2 ** (lowest - mantissa - 1) / scale)}",
        "ticks": [(_number_x(10.0**p), _size(10.0**p)) for p in (-8, -6, -4, -2, 0, 2, 4)],
        "weights": [{"name": name, "value": f"{weight:.6f}", "bits": "".join(
            f"M{4 + 12.75 * i:.2f} {54 + 66 * row}h11.75v18h-11.75z"
            for i, bit in enumerate(f"{_bits(weight):032b}") if bit == "1")}
            for row, (name, weight) in enumerate(zip(names, weights, strict=True))],
        "says": f"{own[0]['name']}: {_size(number)} times {_size(scale)} is stored as "
                f"{_size(kept)}, so {_size(kept / scale)} comes back: an error of "
                f"{100 * error:.1f}%. After {count} updates of {_size(10**step)}, a weight of 1 is "
                f"{weights[0]:.6f} in float32, {weights[1]:.6f} in bfloat16 alone and "
                f"{weights[2]:.6f} with the remainder."}


def quantize(x: float, scale: float, form: str) -> float:
    """scale * x, clamped to the range of an FP8 format and rounded to it."""
    mantissa, lowest, largest = FORMATS[form]
    y = float(np.clip(np.float32(scale) * np.float32(x), -largest, largest))
    step = 2.0 ** (max(lowest, math.frexp(y)[1] - 1) - mantissa)
    return round(y / step) * step  # to an even mantissa in a tie


def updated(update: float, count: int) -> list[float]:
    """A weight of 1 after `count` updates: in float32, in bfloat16, in bfloat16 with a remainder,
    which together are the float32 number."""
    plain = short = np.float32(1)
    for _ in range(count):
        plain, short = plain - np.float32(update), short - np.float32(update)
        bits = _bits(short)
        short = np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(np.float32)
    return [float(plain), float(short), float(plain)]


def _bits(number):
    return int(np.float32(number).view(np.uint32))


def _number_x(v):
    return f"{40 + (math.log10(v) + 9) / 14 * 372:.1f}"


def _size(v):
    """A number in three digits; a whole one in all its digits."""
    if float(v).is_integer() and v < 1e5:
        return f"{v:,.0f}"
    if 1e-3 <= v < 1e4:
        return f"{v:.3g}"
    mantissa, _, exponent = f"{v:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent):+d}"


# ---- what several figures need


def _section(m, name):
    """The text of a section of a milestone's script."""
    sections, title = {}, None
    for block in split_blocks(read_script(m)):
        if block.name.startswith("heading: "):
            title = block.name.removeprefix("heading: ")
        else:
            sections.setdefault(title, []).append(block.text)
    return "\n".join(sections[name])



def _literals(m, name):
    """The tuples and lists of numbers that a block of a milestone's script assigns."""
    text = next(block.text for block in split_blocks(read_script(m)) if block.name == name)
    found = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)
             and isinstance(node.value, ast.Tuple | ast.List))
    return [ast.literal_eval(value) for value in found if all(
        isinstance(it, ast.Constant | ast.UnaryOp | ast.Tuple | ast.List | ast.USub | ast.Load)
        for it in ast.walk(value))]
