"""The time of a step from hand-made launches, and the stored predictions: read, judged, shown.

Run: .venv/bin/python -m pytest tests/test_roofline.py
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from speedrun.figures.predictions import (
    memory_alone,
    memory_table,
    official_table,
    stale_entries,
    write_predictions,
)
from speedrun.history.manifest import load_manifest
from speedrun.history.predictions import StoredPrediction, load_predictions
from speedrun.predict.cards import CARDS
from speedrun.predict.launches import Launch
from speedrun.predict.prediction import Prediction
from speedrun.predict.report import to_json, to_text
from speedrun.predict.roofline import (
    ATTENTION,
    FITTED_ON,
    FLEX_ATTENTION,
    LAUNCH,
    LINKS,
    PRODUCTS,
    TRAFFIC,
    note,
    step_ms,
)
from speedrun.run.fit_batch import find_prediction, largest_predicted
from speedrun.scripts.find import code_hash, find_script
from speedrun.scripts.sizes import length_names

H100 = CARDS["h100"]
MS_OF_BYTES, MS_OF_FLOPS = 3.35e9, 989.4e9  # what an H100 moves and computes in a millisecond
MANIFEST = load_manifest()


def launch(phase, moved=0.0, flops=0.0, name="mm"):
    """A launch with so many milliseconds of bytes and of FLOPs at an H100's rates."""
    return Launch(phase, "library", name, moved * MS_OF_BYTES, flops * MS_OF_FLOPS, "bfloat16")


def step_of(*launches, collectives=None, micro_steps=1):
    """A prediction of a step with these launches."""
    return Prediction(
        micro_batch=1, micro_steps=micro_steps, peaks={"training": 2**30}, memory={}, flops={},
        moved=0, collectives=collectives or {}, launches=launches, graphs=bool(launches))


def time(*launches, world_size=1, **more):
    """The range of their step on H100s."""
    return step_ms(step_of(*launches, **more), H100, world_size)


# ---- the time of a step ----


def test_a_kernel_takes_the_longer_of_its_two_times():
    assert time(launch("forward", moved=2, flops=1)) == pytest.approx(
        (2, max(2 / TRAFFIC, 1 / PRODUCTS) + 1000 * LAUNCH))
    assert time(launch("forward", moved=1, flops=2)) == pytest.approx(
        (2, 2 / PRODUCTS + 1000 * LAUNCH))


def test_attention_is_slower_than_products():
    for name in ("_scaled_dot_product_flash_attention", "_varlen_attn", "_varlen_attn_backward"):
        fused = launch("forward", flops=1, name=name)
        assert time(fused)[1] == pytest.approx(1 / ATTENTION + 1000 * LAUNCH)
    flex = replace(fused, name="triton_tem_fused_flex_attention_0", kind="triton")
    assert time(flex)[1] == pytest.approx(1 / FLEX_ATTENTION + 1000 * LAUNCH)
    assert ATTENTION < FLEX_ATTENTION < PRODUCTS
    assert time(fused)[0] == time(flex)[0] == pytest.approx(1)


def test_products_in_fp8_take_half_the_time():
    in_bf16 = launch("forward", flops=2)
    in_fp8 = [replace(in_bf16, dtype=dtype) for dtype in ("float8_e4m3fn", "float8_e5m2")]
    assert time(in_bf16) == pytest.approx((2, 2 / PRODUCTS + 1000 * LAUNCH))
    assert time(*in_fp8) == pytest.approx((2, 2 / PRODUCTS + 1000 * LAUNCH), rel=1e-2)
    both = replace(step_of(), flops={"bfloat16": 989.4e9, "float8_e5m2": 989.4e9})
    assert both.step_ms(H100)[0] == pytest.approx(1.5)


def test_only_passes_are_repeated():
    step = (launch("forward", moved=1), launch("backward", moved=2), launch("optimizer", moved=4))
    assert time(*step)[0] == pytest.approx(7)
    assert time(*step, micro_steps=3)[0] == pytest.approx(13)


def test_a_kernel_waits_for_the_host():
    tiny = [launch("forward", moved=1e-6)] * 1000
    assert time(*tiny)[0] == pytest.approx(1e-3)
    assert time(*tiny)[1] == pytest.approx(1000 * 1000 * LAUNCH, rel=1e-3)
    # behind a long kernel the host has issued them all
    assert time(launch("forward", moved=100), *tiny)[1] == pytest.approx(100 / TRAFFIC, rel=1e-3)


def test_bytes_to_other_gpus_are_hidden_or_not():
    work = launch("forward", moved=10)
    # each of 8 sends 7/8 twice: 450 MB x 1.75 at 450 GB/s is 1.75 ms
    least, most = time(work, collectives={"allreduce float32": 450e6}, world_size=8)
    assert least == pytest.approx(10)
    assert most == pytest.approx(10 / TRAFFIC + 1.75 / LINKS + 1000 * LAUNCH)
    least, _ = time(work, collectives={"allreduce float32": 4.5e9}, world_size=8)
    assert least == pytest.approx(17.5)  # nothing is faster than the links
    least, _ = time(work, collectives={"allgather bfloat16": 9e9}, world_size=8)
    assert least == pytest.approx(17.5)
    assert time(work, collectives={"allreduce float32": 4.5e9})[0] == pytest.approx(10)


def test_a_report_says_the_time_and_what_it_rests_on():
    step = step_of(launch("forward", flops=PRODUCTS * 100), collectives={"allreduce float32": 1e6})
    text = to_text("x", H100, 8, step, None)
    assert f"  time           {100 * PRODUCTS:.0f} to 100 ms\n" in text
    words = " ".join(text.split())
    assert "fitted on records #5–#6, #11–#13" in words
    assert "links of 450 GB/s each way (NVLink)" in words
    assert "32 GB/s each way (PCIe with 16 lanes, assumed)" in " ".join(note(CARDS["4090"], 2))
    assert "links" not in " ".join(note(CARDS["4090"], 1))
    assert json.loads(to_json("x", H100, 8, step, None))["step_ms"] == pytest.approx(
        [100 * PRODUCTS, 100], rel=1e-3)
    eager = step_of()
    assert "at full speed" in to_text("x", H100, 8, eager, None)
    assert json.loads(to_json("x", H100, 8, eager, None))["step_ms"] is None


@pytest.mark.parametrize(("gib", "graphs", "said"), [
    (60, 0, "60.0 GiB of 80.0 GiB: fits\n"),
    (70, 1, "fits, with less than 15% to spare\n"),
    (150, 1, "does not fit\n"),
    (150, 0, "does not fit operator by operator; compiled code needs less (--compiled)\n"),
])
def test_only_a_peak_beyond_the_card_does_not_fit(gib, graphs, said):
    step = replace(step_of(), peaks={"training": gib * 2**30}, graphs=graphs)
    assert said in to_text("x", H100, 8, step, step)


def test_the_fit_holds_what_it_is_fitted_on_and_is_not_wide():
    stored = load_predictions()
    fitted = [m for m in MANIFEST.milestones if {*m.records} & {*FITTED_ON}]
    assert {number for m in fitted for number in m.records} == {*FITTED_ON}
    assert stored.keys() & {milestone.slug for milestone in fitted}
    for milestone in (m for m in fitted if m.slug in stored):
        p = stored[milestone.slug]
        assert p.least_ms < milestone.step_avg_ms < p.most_ms < 2.2 * p.least_ms


# ---- what is stored ----


def invented(*ids, **changes):
    """Predictions of today's scripts: 2 GiB and half a MiB for each token, so 34 GiB for 65,536."""
    return {MANIFEST.get(id).slug: replace(StoredPrediction(
        code_hash(MANIFEST.get(id).script), peak=34 * 2**30, least_ms=90.0, most_ms=150.0,
        fixed=2 * 2**30, per_token=2.0**19), **changes) for id in ids}


def test_a_file_is_read(tmp_path):
    file, wanted = tmp_path / "predictions.json", invented("00", "01")
    wanted |= invented("05", val_per_token=2.0**17)
    write_predictions(file, wanted)
    assert load_predictions(file) == wanted
    assert wanted["muon"].alone(4096) == 4 * 2**30
    for content, words in (("[]", "must be an object"), ('{"x": {}}', 'x: missing key "code"')):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            load_predictions(file)


def test_staleness_is_found():
    ids = [m.id for m in MANIFEST.milestones]
    stored = invented(*ids)
    assert stale_entries(stored, MANIFEST) == []
    _, one, other, *_ = stored
    del stored[one]  # the table says that it is not predicted
    stored[other] = replace(stored[other], code="another")
    assert stale_entries(stored, MANIFEST) == [
        f"{ids[2]}: the script has changed since it was predicted"]


def test_predictions_stand_beside_official_figures():
    manifest = replace(MANIFEST, milestones=tuple(
        replace(m, peak_memory_mib=32_000) if m.id == "03" else m for m in MANIFEST.milestones
        if m.id in ("00", "01", "02", "03", "03e")))
    lines = official_table(invented("00", "01", "03"), manifest).splitlines()[2:]
    assert [line.strip("| ").split(" | ") for line in lines] == [
        ["00_baseline", "34,816 MiB", "—", "—", "90 to 150 ms", "—", "—"],
        ["01_muon", "34,816 MiB", "—", "—", "90 to 150 ms", "216.3 ms", "out"],
        ["02_modern_arch", "not predicted", "—", "—", "not predicted", "178.9 ms", "—"],
        ["03_distributed_muon", "34,816 MiB", "32,000 MiB", "+9%", "90 to 150 ms", "153.8 ms",
         "out, fitted on it"],
        ["03e_bfloat16", "not predicted", "—", "—", "not predicted", "144.7 ms", "—"],
    ]
    assert official_table(invented("03e"), manifest).endswith("| 144.7 ms | in |")


def test_memory_decides_the_micro_batch():
    line = memory_table(invented("01", "05"), MANIFEST).splitlines()[2:]
    # 85 % of 12, 16, 24, 32, 80 GiB, less 2: 8.2, 11.6, 18.4, 25.2, 66 GiB, 2,048 tokens each
    assert line == [
        "| 01 | 16 x 1,024 | 16 x 1,024 | 32 x 1,024 | 32 x 1,024 | 128 x 1,024 |",
        "| 05 | 1 x 16,384 | 1 x 16,384 | 1 x 32,768 | 1 x 32,768 | 2 x 65,536 |",
    ]
    table = memory_table(invented("01", "02", "03", "05"), MANIFEST)  # neighbours share a row
    assert [row.split(" | ")[0] for row in table.splitlines()[2:]] == ["| 01, 02, 03", "| 05"]
    assert memory_table(invented("01", fixed=30 * 2**30), MANIFEST).endswith(  # of 27.2 and 68 GiB
        "\n| 01 | none | none | none | none | 64 x 1,024 |")
    (found,) = invented("01").values()
    own = find_script("01").hyperparameters
    assert largest_predicted(found, own, 1, 2 * 2**30) is None
    assert str(largest_predicted(found, own, 8, 80 * 2**30)) == "64 x 1,024"  # a rank has no more


def test_sequences_of_validation_are_shortened_by_themselves():
    (found,) = invented("05", val_per_token=2.0**17).values()  # an eighth of a MiB
    own = dict(total_batch_size=393_216, micro_batch_size=1, train_seq_len=49_152,
               val_seq_len=262_144, val_tokens=10_485_760)  # 24 and 32 GiB, beside 2
    assert found.alone(49_152, 262_144) == 34 * 2**30
    for gib, text, options in (
            (34, "1 x 49,152 / 262,144", ""),
            (26, "1 x 49,152 / 131,072", " --set val_seq_len=131072"),
            (25, "1 x 24,576 / 131,072", " --set train_seq_len=24576 --set val_seq_len=131072"),
            (66, "2 x 49,152 / 262,144", "")):
        fitting = largest_predicted(found, own, 1, gib * 2**30)
        assert (str(fitting), fitting.shortened(own)) == (text, options)
        assert fitting.peak <= gib * 2**30


@pytest.mark.parametrize(("own", "stored"), [
    ({"seq_len": 1024}, {}), ({"seq_len": 65_536}, {}),
    ({"train_seq_len": 49_152, "val_seq_len": 262_144}, {"val_per_token": 2.0**17})])
def test_two_runs_tell_the_memory_of_one_gpu(own, stored, monkeypatch):
    def observed(script, card, world_size, sizes, compiled):
        assert sizes.keys() == {*own, "micro_batch_size", "total_batch_size"} and world_size == 1
        train, val = (sizes["micro_batch_size"] * sizes[name] for name in length_names(own))
        assert sizes["total_batch_size"] == 2 * train and train == val in (8192, 49_152, 65_536)
        return replace(step_of(), peaks={
            "training": 2 * 2**30 + 2**19 * train, "validation": 2**30 + 2**17 * val})

    monkeypatch.setattr("speedrun.figures.predictions.observe", observed)
    assert memory_alone(SimpleNamespace(hyperparameters=own)) == {
        "fixed": 2 * 2**30, "per_token": 2.0**19, **stored}


def test_a_prediction_holds_for_its_code_and_settings(monkeypatch, tmp_path):
    stored = invented("01")
    monkeypatch.setattr("speedrun.run.fit_batch.load_predictions", lambda: stored)
    script = find_script("01")
    assert find_prediction(script, {}) is stored["muon"]
    assert find_prediction(script, {"seed": "3", "seq_len": 512, "model_dim": "768"})
    assert find_prediction(script, {"model_dim": "1024"}) is None
    assert find_prediction(script, {"compile": "False"}) is None
    assert find_prediction(find_script("02"), {"own": "1"}) is None
    stored["muon"] = replace(stored["muon"], code="another")
    assert find_prediction(script, {}) is None
    other = tmp_path / "train_gpt.py"
    other.write_text(script.path.read_text(encoding="utf-8"), encoding="utf-8")
    assert find_prediction(find_script(str(other)), {}) is None


def test_without_a_file_nothing_is_predicted(monkeypatch, tmp_path):
    for file in (tmp_path / "none.json", tmp_path):
        monkeypatch.setattr(load_predictions, "__defaults__", (file,))
        assert find_prediction(find_script("01"), {}) is None
