"""The interactive figures: their arithmetic is the snapshots', in Python and in JavaScript.

Run: .venv/bin/python -m pytest tests/test_interactive.py; it needs node. Whether a figure begins as
its still picture and follows the keyboard is tested with the site's pages, in a browser.
"""

import json
import shutil
import subprocess
from itertools import chain, islice
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from speedrun.diff.html import TEMPLATES
from speedrun.history.fields import default_hyperparameters
from speedrun.history.handles import handles_of
from speedrun.history.manifest import load_manifest
from speedrun.history.tokens import tokens_after
from speedrun.scripts.find import load_snapshot
from speedrun.site import interactive

MANIFEST = load_manifest()
KB = 1000


def calls(figure, function, arguments):
    """What a function of a figure's script returns for each list of arguments, run by node."""
    node = shutil.which("node")
    if not node:
        pytest.skip("not run: there is no node")
    source = (f"const figure = require({json.dumps(str(TEMPLATES / 'figures' / f'{figure}.js'))});"
              "const all = JSON.parse(require('fs').readFileSync(0));"
              f"console.log(JSON.stringify(all.map((values) => figure.{function}(...values))))")
    ended = subprocess.run([node, "-e", source], input=json.dumps(arguments), text=True,
                           capture_output=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def still(figure):
    """The values of a figure's still picture."""
    return interactive.still(MANIFEST, figure)


def snapshot(slug):
    return load_snapshot(MANIFEST.get(slug).script)


@pytest.mark.parametrize("figure", interactive.PLACES)
def test_a_figure_is_small(figure):
    files = [TEMPLATES / "figures" / f"{figure}{end}" for end in (".html", ".js")]
    assert sum(file.stat().st_size for file in files) <= 12 * KB
    assert files[0].read_text(encoding="utf-8").partition("</h2>")[0].endswith("?")


def test_rounds_are_those_of_the_snapshots():
    cubic, quintic, polar = still("newton_schulz")["own"]
    ratios = [10**-3.5, 10**-2.5, 0.03, 0.3]
    spectra = calls("newton_schulz", "spectrum", [[ratio] for ratio in ratios])
    for method, orthogonalise in ((quintic, snapshot("muon").newton_schulz),
                                  (polar, snapshot("polar_express").polar_express)):
        matrices = torch.stack([torch.diag(torch.tensor(values)) for values in spectra])
        wanted = orthogonalise(matrices, torch.float32).diagonal(dim1=-2, dim2=-1)
        found = calls("newton_schulz", "rounds", [[method, v, 5] for v in sum(spectra, [])])
        torch.testing.assert_close(torch.tensor(found).view_as(wanted), wanted,
                                   rtol=1e-3, atol=1e-4)  # float32, and the norm's epsilon
    every = [[m, v, n] for m in (cubic, quintic, polar) for v in spectra[1] for n in range(17)]
    assert calls("newton_schulz", "rounds", every) == pytest.approx(
        [interactive.rounds(*values) for values in every], rel=1e-9)


@pytest.mark.parametrize("mode, slug", [*enumerate(interactive.PLACES["document_tiles"])])
def test_pairs_and_tiles_are_those_of_the_snapshots(mode, slug):
    module, handles = snapshot(slug), handles_of(MANIFEST.get(slug), MANIFEST)
    tokens, args = 32, module.Hyperparameters()
    for starts, window, tile in (((0, 9, 22), 12, 4), ((0, 8, 16), 1, 8), ((0, 31), 32, 2),
                                 ((0, 5, 6), 7, 4)):
        vars(args).update(handles.PATHS["dense"], tile_size=tile, compile=True)
        inputs = torch.full((1, tokens), args.bos_id - 1)
        inputs[0, list(starts)] = args.bos_id
        wanted = handles.mask(module, inputs, window, args)[0, 0]
        [found] = calls("document_tiles", "mask", [[mode, starts, window, tile]])
        assert [[k for k, sees in enumerate(row) if sees] for row in wanted.tolist()] == found[
            "pairs"]
        if "flex" not in handles.PATHS:
            continue
        vars(args).update(handles.PATHS["flex"])
        if handles.WINDOW == "tokens":  # its tiles have 128 x 128 pairs
            tile, length = 128, 512
            inputs = torch.full((1, length), args.bos_id - 1)
            starts, window = [16 * start for start in starts], 16 * window
            inputs[0, starts] = args.bos_id
            [found] = calls("document_tiles", "mask", [[mode, starts, window, tile, length]])
        mask = handles.mask(module, inputs, window, args)
        for is_full, numbers, indices in (
                (False, mask.kv_num_blocks, mask.kv_indices),
                (True, mask.full_kv_num_blocks, mask.full_kv_indices)):
            listed = {(q, k) for q, row in enumerate(indices[0, 0].tolist())
                      for k in row[: numbers[0, 0, q]]}
            assert listed == {(q, k) for q, row in enumerate(found["tiles"])
                              for k, seen in enumerate(row)
                              if seen and (seen == tile**2) == is_full}


SHOWN = ("baseline", "window_warmup", "staged_windows", "one_skip", "batch_schedule", "multi_token",
         MANIFEST.of_chain().milestones[-1].slug)


@pytest.mark.parametrize("slug", SHOWN)
def test_schedules_are_those_of_the_snapshots(slug):
    milestone, module = MANIFEST.get(slug), snapshot(slug)
    args, handles = module.Hyperparameters(), handles_of(milestone)
    drawn = interactive.schedules_of(milestone)
    steps = range(0, args.train_steps, 7)
    wanted = {
        "rate": [module.lr_multiplier(step, args) for step in steps],
        "momentum": [handles.momentum(module, step, args) for step in steps],
        "window": [(*handles.window_at(module, step, args), None)[0] for step in steps],
        "tokens": [args.total_batch_size * handles.row_len(module, step, args)
                   // handles.row_len(module, 0, args) for step in steps],
        "targets": [sum(handles.target_weights(module, step, args)[1:]) for step in steps]}
    there = {name: values for name, values in wanted.items() if values[0] is not None}
    assert {name for name in wanted if drawn[name] is None} == wanted.keys() - there.keys()
    found = iter(calls("schedules", "valueAt", [
        [drawn[name], step] for name in there for step in steps]))
    for name, values in there.items():
        assert [*islice(found, len(steps))] == pytest.approx(values, rel=1e-6, abs=1e-6), name
    first = 2 * args.train_steps // 3
    [found] = calls("schedules", "tokensBefore", [[drawn, first]])
    assert found == tokens_after(default_hyperparameters(milestone.script), first)


@pytest.mark.parametrize("slug", interactive.PLACES["schedules"])
def test_schedules_open_with_the_page_s_milestone_and_its_parent(slug):
    milestone = MANIFEST.get(slug)
    shown = interactive.figures_of(MANIFEST, [milestone])["schedules"]
    assert [shown["own"][shown[line]]["id"] for line in ("first", "second")] == [
        milestone.parent, milestone.id]
    longest = max(default_hyperparameters(MANIFEST.get(id).script)["train_steps"]
                  for id in (milestone.parent, milestone.id))
    assert shown["longest"] == longest
    assert {panel["last"] for panel in shown["panels"]} == {f"{longest:,}"}


@pytest.mark.parametrize("mode", range(5))
def test_lanes_send_and_compute_what_the_optimizers_do(mode, monkeypatch):
    later = interactive.PLACES["eight_lanes"]
    slug = (MANIFEST.get(MANIFEST.get(later[0]).parent).slug, *later)[mode]
    module, handles = snapshot(slug), handles_of(MANIFEST.get(slug))
    layers, width, vocab, ranks = 3, 16, 64, 8  # 12 small and 6 large matrices: uneven shares
    sent, units, useful = [], [0] * ranks, [0] * ranks

    def record(factor, place):
        def collective(*tensors, **_):
            sent.append(factor * tensors[place].nbytes)
            if tensors[0].numel() < tensors[-1].numel():  # scattered: a rank's own share
                tensors[0].copy_(tensors[-1].chunk(ranks)[rank])
            return SimpleNamespace(wait=lambda: None)
        return collective

    def counted(matrices, *_):
        m, n = matrices.shape[-2:]
        size = 1 if m == n else 3
        units[rank] += matrices.shape[:-2].numel() * size
        useful[rank] += matrices.flatten(0, -3).any((1, 2)).sum().item() * size  # padding is zeros
        return matrices

    for name, factor, place in (("all_reduce", interactive.ALL_REDUCE, 0),
                                ("reduce_scatter_tensor", interactive.ONE_WAY, 1),
                                ("all_gather_into_tensor", interactive.ONE_WAY, 0)):
        monkeypatch.setattr(dist, name, record(factor, place))
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(module, "newton_schulz", counted)
    for rank in range(ranks):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        sent.clear()
        table, *matrices = (torch.nn.Parameter(torch.ones(shape)) for shape in (
            (vocab, width), *[*[(width, width)] * 4, *[(width, 4 * width)] * 2] * layers))
        for param in (table, *matrices):
            param.grad = torch.ones_like(param)
        if mode >= 3:
            module.ShardedAdam([dict(params=[table], lr=1.0)], (0.9, 0.9), 1.0, False).step()
        handles.make_muon(module, matrices, lr=1.0, bf16=True).step()
    [steps] = calls("eight_lanes", "plan", [[mode, layers, width, vocab]])
    planned = [step[2] for step in steps if step[0] == "send"]
    if mode < 3:  # DistributedDataParallel sends all gradients
        assert planned[:2] == [interactive.ALL_REDUCE * table.nbytes, interactive.ALL_REDUCE * sum(
            matrix.nbytes for matrix in matrices)]
        planned = planned[2:]
    assert sum(planned) == sum(sent)
    for kinds, wanted in (((1,), useful), ((1, 4), units)):
        assert [sum(step) for step in zip(*(
            step[2] for step in steps if step[0] == "compute" and step[1] in kinds),
            strict=True)] == wanted
    every = [(1, 10, 0.3), (7, 450, 0.01), (12, 150, 0.1)]
    shown = calls("eight_lanes", "step", [[mode, *settings] for settings in every])
    for (count, *speeds), found in zip(every, shown, strict=True):
        total, bars, amount, idle = interactive.simulate(interactive.plan(mode, count), *speeds)
        assert found["sent"] == amount
        assert [found["total"], found["idle"]] == pytest.approx([total, idle])
        assert sum(found["bars"], []) == pytest.approx(list(chain(*bars)))


def test_formats_are_those_of_the_snapshots():
    head, later = snapshot("fp8_head"), snapshot("bfloat16_weights")
    numbers = torch.cat([torch.logspace(-9, 5, 400), torch.arange(64) / 16, torch.tensor([0.0])])
    numbers = torch.cat([numbers, -numbers])
    for use in still("number_formats")["own"]:
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[use["format"]]
        wanted = head.quantize(numbers, use["scale"], dtype).float().tolist()
        every = [[x, use["scale"], use["format"]] for x in numbers.tolist()]
        assert calls("number_formats", "quantize", every) == wanted
        assert [interactive.quantize(*values) for values in every] == wanted
    shown = still("number_formats")
    assert shown["range"] == "full precision: 0.00781 to 224; 0 below 4.9e-4"
    scale, form = shown["own"][0]["scale"], shown["own"][0]["format"]
    assert interactive.quantize(4.88e-4, scale, form) == 0 < interactive.quantize(
        4.89e-4, scale, form)
    upper, lower = later.split_bits(numbers)
    upper = (upper.view(torch.int16).int() & 0xFFFF).tolist()
    found = calls("number_formats", "split", [[x] for x in numbers.tolist()])
    assert found == [list(both) for both in zip(upper, lower.tolist(), strict=True)]
    assert calls("number_formats", "join", found) == numbers.tolist()
    for update, count in ((1e-4, 100), (2e-3, 70), (1e-8, 400)):
        exact, [short], step = torch.ones(1), torch.ones(1).bfloat16(), torch.tensor(update)
        weights, remainders = later.split_bits(exact.clone())
        for _ in range(count):
            exact = exact - step
            short = (short.float() - step).bfloat16()
            later.cautious_update(weights, torch.ones(1), step, 0.0, remainders)
        assert later.join_bits(weights, remainders) == exact
        wanted = [exact.item(), short.item(), exact.item()]
        assert calls("number_formats", "updated", [[update, count]]) == [wanted]
        assert interactive.updated(update, count) == wanted
