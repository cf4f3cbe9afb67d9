"""The picture of a model shows what the module tree has and what the forward pass does.

Run: .venv/bin/python -m pytest tests/test_anatomy.py
"""

import os
import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import replace

import nbformat
import pytest
import torch
import torch.nn.functional as F
from IPython.display import SVG

from snapshots import known_values
from speedrun.anatomy.picture import ACCENT, model_svg, parts, removed, strip_svg
from speedrun.anatomy.trace import Layer, Tracer, anatomy, trace
from speedrun.history.manifest import REPOSITORY, load_manifest
from speedrun.scripts.find import handles_for, load_snapshot

MANIFEST = load_manifest()
MODEL = {"GPT", "Block", "CausalSelfAttention", "MLP", "Rotary", "attention_mask"}
CHANGED = [m.id for m in MANIFEST.milestones if m.script.name == "train_gpt.py"
           and (not m.parent or MODEL & {*m.changes})]
QUICK = {"00", "03b", "05k", "09", *{MANIFEST.get(id).chain: id for id in CHANGED}.values()}  # with
# the last of each chain: a second or two each


def drawn(svg):
    """{part: its group} of a picture."""
    groups = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}g")
    return {group.get("data-part"): group for group in groups if group.get("data-part")}


def numbers(names, kind):
    """The layers of the parts of this kind."""
    return {int(name.split()[-1]) for name in names if re.fullmatch(rf"{kind} \d+", name)}


def place(part):
    """(left end, width) of the first box of a part of a picture."""
    box = next(element for element in part.iter() if element.tag.endswith("rect"))
    return float(box.get("x")), float(box.get("width"))



@pytest.mark.parametrize("id", [
    pytest.param(id, marks=[] if id in QUICK else [pytest.mark.slow, pytest.mark.skipif(
        not os.environ.get("RUN_SLOW"), reason="a second or two each; RUN_SLOW=1 draws all")])
    for id in CHANGED])
def test_picture_shows_the_module_tree(id):
    module = load_snapshot(MANIFEST.get(id).script)
    args = module.Hyperparameters()
    with torch.device("meta"):
        model = module.GPT(args)
    svg = model_svg(MANIFEST, id)
    parts = drawn(svg)
    L = len(model.blocks)
    attention = {i for i in range(L) if model.blocks[i].attn is not None}
    assert numbers(parts, "attn") == attention
    assert numbers(parts, "no attn") == {*range(L)} - attention
    mlps = {i for i in range(L) if model.blocks[i].mlp is not None}
    assert numbers(parts, "mlp") == mlps and numbers(parts, "no mlp") == {*range(L)} - mlps
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"{count / 1e6:.1f}M parameters".encode() in svg and f"{L} layers".encode() in svg
    assert svg.count(b'data-part="gate') <= 3 * L  # gates, not the tensors that they consist of
    known = known_values(id)
    record, picture = known.get("record", {}), known["picture"]
    tables = record.get("value_embed_pattern", "." * L)
    assert numbers(parts, "table") == {i for i in range(L) if tables[i] != "."}
    for i in numbers(parts, "table"):
        assert "".join(parts[f"table {i}"].itertext()) == tables[i]
    for part in ("positions", "smear", "cap"):
        assert (part in parts) == picture[part], part
    assert ("tied" in parts) == (model.embed.weight is model.lm_head.weight)
    if kinds := record.get("window_pattern"):
        windows = {i: int("".join(parts[f"window {i}"].itertext()).replace(",", ""))
                   for i in attention}
        of_kind = defaultdict(set)
        for i, window in windows.items():
            of_kind[kinds[i]].add(window)
            box, bar = (place(parts[f"{part} {i}"]) for part in ("attn", "window"))
            assert bar[0] + bar[1] == pytest.approx(box[0] + box[1], abs=0.01)  # its token
            assert bar[1] / box[1] == pytest.approx(window / max(windows.values()), abs=1e-3)
        (short,), (long,) = of_kind["S"], of_kind["L"]
        assert short < long
        assert of_kind["P"] <= {short // 2}  # the same number of slots, of which a token has two
        paired = {i for i in attention if kinds[i] == "P"}
        assert numbers(parts, "pair") == paired
    composed = record.get("composed_window")
    assert numbers(parts, "composed") == ({L - 1} if composed else set())
    assert not composed or f"to the last {composed} tokens".encode() in svg
    rings = [circle.get("fill") for i in numbers(parts, "composed")
             for circle in parts[f"composed {i}"].iter() if circle.tag.endswith("circle")]
    assert rings == ["none"] * bool(composed)
    skips = sorted(tuple(map(int, name[5:].split("-"))) for name in parts if name[:5] == "skip ")
    words = ", ".join(f"{start} to {end if end < L else 'head'}" for start, end in skips)
    assert (f"Skips from layer {words}.".encode() in svg) == bool(skips)
    assert numbers(parts, "bigrams") == {*picture["bigrams"]}
    if kinds:
        assert long == handles_for(module.__file__).window_at(module, args.train_steps, args)[-1]


@pytest.mark.parametrize("id", sorted(QUICK))
def test_every_parameter_is_in_the_picture(id):
    """A forward pass reads all of them, each in a module or on the way between two."""
    module = load_snapshot(MANIFEST.get(id).script)
    args = module.Hyperparameters(model_dim=module.Hyperparameters().num_heads * 16, vocab_size=64)
    model = module.GPT(args).eval()
    with torch.no_grad(), Tracer(
            model, 256, handles_for(module.__file__)) as tracer:
        model(torch.ones(1, 256, dtype=torch.int64))
    read = set().union(*tracer.used.values(), *tracer.sources.values())
    assert {f"w:{name}" for name, _parameter in model.named_parameters()} <= read


def test_what_runs_is_drawn_not_what_is_written(monkeypatch):
    module = load_snapshot(MANIFEST.get("09").script)
    before = trace(module)
    assert before.smear and before.activation == "ReLU²" and before.layers[4].x0
    block = module.Block.forward
    monkeypatch.setattr(module, "smear", lambda x, weight, gate: x)
    monkeypatch.setattr(
        module.MLP, "forward", lambda self, x: F.gelu(x @ self.c_fc) @ self.c_proj.T)
    monkeypatch.setattr(
        module.Block, "forward", lambda self, x, embeds, x0, scalars, masks: block(
            self, x, {}, x, scalars, masks))
    after = trace(module)
    assert not after.smear and after.activation == "GELU"
    assert not any(layer.x0 or layer.tables for layer in after.layers)
    assert [layer.window for layer in after.layers] == [layer.window for layer in before.layers]
    assert after.skips == before.skips == {(0, 9), (1, 8), (2, 7), (3, 6), (7, 11)}
    assert before.subtracted == {(7, 11)}


def test_what_computes_a_coefficient_is_no_stream():
    last = anatomy(MANIFEST.get("14i"))  # layer 3's output sets later layers' coefficients, too
    assert last.skips == {(3, 6), (3, 11), (7, 9), (7, 10), (7, 11), (9, 11)}
    assert last.subtracted == {(7, 11)}  # its coefficient starts at -0.5
    assert [i for i, layer in enumerate(last.layers) if layer.gates] == [1, 2, 3, 8, 9, 10]
    gates = [layer.gates for layer in anatomy(MANIFEST.get("11d")).layers]  # no skip's, no smear's
    both = ("attention_gates", "value_gates")
    assert gates == [both] * 2 + [both[:1]] * 4 + [(), both[:1]] + [both] * 3


def coloured(svg):
    """The parts of a picture that are in colour."""
    return {name for name, group in drawn(svg).items()
            if ACCENT in ElementTree.tostring(group, encoding="unicode")}


def test_a_picture_marks_what_changed():
    def marked(changed):
        return coloured(model_svg(MANIFEST, "09", changed))

    assert marked("08g") == {"skip 7-11"} and marked(()) == set()
    assert removed(MANIFEST, "09", "08g") == [] and removed(MANIFEST, "08g", "09") == ["skip 7-11"]
    assert marked(["mlp 1"]) == {"mlp 1"}, "not of layer 10, too"
    assert marked(["mlp 3", "gate"]) == {"mlp 3"} | {f"gate {i}" for i in range(11) if i != 6}
    for changed in (), ["skip 7-11"]:  # the sentence about such arcs is in colour, too
        (sentence,) = [text for text in ElementTree.fromstring(
            model_svg(MANIFEST, "09", changed)).iter() if (text.text or "").startswith("an arc")]
        assert (sentence.get("fill") == ACCENT) == bool(changed)


@pytest.mark.parametrize("field, names", [
    *[(name, {part}) for name, part in dict(
        fp8="head", norm="norm", learned_positions="positions", smear="smear",
        cap="cap").items()],
    ("rotating", {"attn 0"}), ("qk_norm", {"attn 0"}), ("activation", {"mlp 0"}),
    ("window", {"window 0"}), ("tables", {"table 0"}), ("x0", {"x0 0"}),
    ("first_values", {"values 0"}), ("bigrams", {"bigrams 0"}), ("paired", {"pair 0"}),
    ("composed", {"composed 0"}), ("gates", {"gate 0 0"}), ("mlp", {"mlp 0"}),
    ("attention", {"attn 0"}), ("tied", {"embed", "head"}), ("skips", {"skip 0-1"}),
    ("name", set())])
def test_what_changes_a_part(field, names):
    model = anatomy(MANIFEST.get("01"))
    model = replace(model, layers=(Layer(attention=True, mlp=True, window=9),))
    other = {"skips": {(0, 1)}, "gates": ("gate",), "attention": False, "mlp": False}.get(field, 7)
    changed = replace(model, **{field: other}) if field in vars(model) and field != "tables" else (
        replace(model, layers=(replace(model.layers[0], **{field: other}),)))
    before, after = parts(model), parts(changed)
    found = {name for name in before | after if before.get(name) != after.get(name)}
    assert found == names


def test_the_tip_of_an_arrow_is_its_line_s_end():
    tips = re.findall(r'([\d.]+)L([\d.]+) ([\d.]+)"[^>]*/><path d="M\2 \3l-3 (-?)5h6z"',
                      model_svg(MANIFEST, "03b").decode())
    assert {sign for *_, sign in tips} == {"", "-"}
    for before, _x, y, sign in tips:
        assert (float(before) < float(y)) == (sign == "-"), "its other corners are behind it"


def points(part):
    """The corners of a part's line."""
    path = next(element for element in part.iter() if element.tag.endswith("path"))
    return [tuple(map(float, point.split())) for point in path.get("d")[1:].split("L")]


def test_lines_of_a_picture_lead_where_they_should():
    svg = model_svg(MANIFEST, "14i")  # six skips; some share an end
    parts, deep = drawn(svg), {}
    boxes = [place(parts.get(f"mlp {i}") or parts[f"no mlp {i}"]) for i in range(11)]
    for name in parts:
        if skip := re.fullmatch(r"skip (\d+)-(\d+)", name):
            start, end = map(int, skip.groups())
            (left, _), (_, deep[start, end]), _, (right, _) = points(parts[name])
            assert sum(boxes[start]) < left < boxes[start + 1][0], name
            assert sum(boxes[end - 1]) < right and (end == 11 or right < boxes[end][0]), name
    for a, b in deep:  # an arc around another runs below it, and the legend below all
        assert all(deep[a, b] < deep[c, d] for c, d in deep
                   if c <= a and b <= d and (a, b) != (c, d)), (a, b)
    text = next(it for it in ElementTree.fromstring(svg).iter() if it.text and it.text.startswith(
        "attention: "))
    assert float(text.get("y")) > max(deep.values())
    assert "minus a share" in "".join(parts["skip 7-11"].itertext())
    (last, y), _ = points(parts[f"x0 {max(numbers(parts, 'x0'))}"])
    assert f'L{last:g} {y:g}" ' in svg.decode(), "the embedding's line reaches its last reader"


def test_a_broken_outline_is_what_is_not_there():
    svg = model_svg(MANIFEST, "09", ["mlp 3"])
    looks = {name: next(it for it in part.iter() if it.tag.endswith("rect"))
             for name, part in drawn(svg).items() if "attn" in name or "mlp" in name}
    assert {name for name, box in looks.items() if box.get("stroke-dasharray")} == {
        name for name in looks if name.startswith("no ")} != set()
    filled = {name: float(box.get("fill-opacity")) for name, box in looks.items()}
    assert filled["mlp 3"] > filled["mlp 2"] > filled["no attn 6"] == 0
    assert model_svg(MANIFEST, "00").count(b'stroke-dasharray="4 3"') == 1, "the one tied matrix"
    dots = [part.find("{*}circle").get("fill") for name, part in drawn(svg).items()
            if name.startswith("gate")]
    assert dots and "none" not in dots, "only a ring is empty"


@pytest.mark.parametrize(("id", "seen"), [("e2", "row"), ("e2a", "document")])
def test_a_picture_says_how_far_back_a_token_sees(id, seen):
    assert f"every token before it in its {seen}".encode() in model_svg(MANIFEST, id)


def test_a_strip_has_every_model_and_can_be_repeated():
    ids = ["00", "08g", "09"]
    strip = strip_svg(MANIFEST, ids)
    assert strip == strip_svg(MANIFEST, ids) and len(strip) < 60_000
    models = [ElementTree.tostring(model) for model in ElementTree.fromstring(strip)
              if model.tag.endswith("g")]
    assert [id for id, model in zip(ids, models, strict=True)
            if MANIFEST.get(id).name.encode() in model] == ids
    assert not coloured(models[0]) and coloured(models[2]) == {"skip 7-11"}, "beside the last one"


@pytest.mark.parametrize("lesson, draw", [
    ("00_baseline", lambda: model_svg(MANIFEST, "00", (), "white")),
    ("14_sublayer_scalars", lambda: model_svg(MANIFEST, "14i", "13f", "white")),
    ("start_here", lambda: strip_svg(MANIFEST, ["00", "02", "04", "06", "09"], "white"))])
def test_a_lesson_has_the_picture_as_it_is_drawn_now(lesson, draw):
    """It was seen to be right; who draws otherwise runs the lessons again, and looks."""
    cells = nbformat.read(REPOSITORY / "lessons" / f"{lesson}.ipynb", as_version=4).cells
    (shown,) = (output.data["image/svg+xml"] for cell in cells for output in cell.get("outputs", ())
                if "draw_model" in cell.source)
    assert SVG(draw()).data == shown


def test_the_traced_numbers_of_a_notebook_stay(monkeypatch):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    anatomy.cache_clear()
    anatomy(MANIFEST.get("00"))
    assert torch.equal(torch.rand(1), expected)
