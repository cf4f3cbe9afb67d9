"""What predictions report, and the stored ones: read, judged, shown.

Run: .venv/bin/python -m pytest tests/test_predictions.py
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import predict as command
from speedrun.figures import predictions
from speedrun.figures.one_gpu import load_log, one_gpu_table
from speedrun.figures.predictions import (
    memory_alone,
    memory_table,
    predict_stale,
    stale_entries,
    write_predictions,
)
from speedrun.history.manifest import load_manifest
from speedrun.history.predictions import StoredPrediction, load_predictions
from speedrun.predict.cards import CARDS
from speedrun.predict.prediction import Kernel, Launch, Prediction
from speedrun.predict.report import span, to_columns, to_json, to_text
from speedrun.predict.runs import predict_time
from speedrun.run.fit_batch import find_prediction, largest_predicted
from speedrun.scripts.find import code_hash, find_script
from speedrun.scripts.sizes import length_names

H100 = CARDS["h100"]
MANIFEST = load_manifest().of_chain()
STEP = Prediction(micro_batch=1, micro_steps=1, peaks={"training": 2**30}, memory={},
                  flops={"bfloat16": 2e12}, moved=3e12, collectives={"allreduce float32": 1e6})


# ---- what a report says ----


def test_a_report_of_a_compiled_step_counts_its_launches_and_kernels():
    launches = (
        Launch("forward", "library", "mm", 2e9, 1e12, "bfloat16"),
        Launch("forward", "library", "_varlen_attn", 1e9, 2e12, "bfloat16"),
        Launch("backward", "triton", "triton_poi_0", 3e9, 0, None),
        Launch("backward", "eager", "add", 4e9, 0, None),
        *2 * [Launch("optimizer", "library", "bmm", 5e9, 3e12, "bfloat16")])
    kernels = (Kernel("small", 32, 0, 1024), Kernel("near", 64, 0, 220_000),
               Kernel("large", 255, 48, 240_000))
    step = replace(STEP, graphs=9, launches=launches, kernels=kernels)
    lines = to_text("x", H100, 8, step, None).splitlines()
    assert lines[lines.index("a step of a rank") + 1:][:3] == [
        "  products       2.0 TFLOP in bfloat16", "  memory traffic 3.00 TB",
        "  allreduce float32 1.0 MB"]
    assert "largest batch    not even one sequence leaves 15% free" in lines
    assert "  attention          1      1.0 GB     2.0 TFLOP" in lines
    assert "  optimizer          2     10.0 GB     6.0 TFLOP" in lines
    assert "graphs           9, none of them after the warm-up" in lines
    at = lines.index("kernels          3 of Triton's: 1 of them do not fit, 1 spill")
    assert lines[at + 1 : at + 5] == [
        "  near", "    64 registers, 0 bytes spilled, 220,000 of 232,448 bytes shared",
        "  large", "    255 registers, 48 bytes spilled, 240,000 of 232,448 bytes shared"]
    assert not any("ms" in line.split() for line in lines)
    told = json.loads(to_json("x", H100, 8, step, None))
    assert told["launches"]["fused"] == {"launches": 1, "moved": 3e9, "flops": 0}
    assert told["launches"]["other"]["moved"] == 4e9 and told["largest_micro_batch"] is None


def test_a_report_of_a_step_operator_by_operator():
    step = replace(STEP, peaks={"training": 2**30, "validation": 2**31}, memory={"moments": 2**29},
                   saved=3 * 2**29)
    largest = replace(STEP, micro_batch=4, peaks={"training": 5 * 2**30})
    lines = to_text("x", H100, 8, step, largest).splitlines()
    assert lines[1:6] == [
        "peak memory      2.0 GiB of 80.0 GiB: fits",
        "  training       1.0 GiB", "  validation     2.0 GiB",
        "what stays       moments 0.5 GiB",
        "largest batch    4 sequences per forward pass, 5.0 GiB"]
    assert "  saved          1.5 GiB from a forward pass to its backward pass" in lines
    assert lines[-2].startswith("Not in it: what compilation fuses")
    assert json.loads(to_json("x", H100, 8, step, largest))["largest_micro_batch"] == 4
    assert "leaves 15% free operator by operator; may still" in to_text("x", H100, 8, step, None)


def test_the_columns_of_a_table():
    step = replace(STEP, saved=3 * 2**29, collectives={"allreduce float32": 1e8})
    columns = to_columns({"x": step}, {"x": None})
    assert columns == {"": ["x"], "rows": ["1"], "peak": ["1.0 GiB"], "run": ["—"],
                       "saved": ["1.5 GiB"], "launches": ["0"], "products": ["2.0 TFLOP"],
                       "traffic": ["3.00 TB"], "collectives": ["100.0 MB"]}


@pytest.mark.parametrize(("gib", "graphs", "compiles", "said"), [
    (60, 0, True, "60.0 GiB of 80.0 GiB: fits\n"),
    (70, 1, True, "fits, with less than 15% to spare\n"),
    (150, 1, True, ": does not fit\n"),
    (150, 0, True, ": too much operator by operator; may still fit, because a run's compiled code"
     " needs less (--compiled predicts it)\n"),
    (150, 0, False, ": does not fit\n"),  # a run of the script does not compile it either
])
def test_only_a_peak_beyond_the_card_does_not_fit(gib, graphs, compiles, said):
    step = replace(STEP, peaks={"training": gib * 2**30}, graphs=graphs)
    assert said in to_text("x", H100, 8, step, step, compiles=compiles)


@pytest.mark.parametrize(("seconds", "text"), [
    (0.4264, "426 ms"), (1.06, "1.1 s"), (547, "9.1 min"), (5400, "1.5 h"), (200_000, "2.3 days")])
def test_a_span_of_time(seconds, text):
    assert span(seconds) == text


def test_the_time_of_a_run_is_its_arithmetic_by_a_share_of_the_peak(monkeypatch):
    monkeypatch.setattr("speedrun.scripts.flops.training_flops_per_token",
                        lambda script, values: 1e9 * values.get("num_layers", 1))
    script = SimpleNamespace(path=None, hyperparameters=dict(
        train_steps=100, total_batch_size=1_652_000, num_layers=2))
    time = predict_time(script, CARDS["4090"], 2, {}, 0.5)  # 165.2 TFLOP/s
    assert (time.step_s, time.run_s) == (pytest.approx(20.0), pytest.approx(2000.0))
    assert predict_time(script, CARDS["4090"], 1, {"num_layers": 1}, 0.5).step_s == (
        pytest.approx(20.0))
    lines = to_text("x", CARDS["4090"], 2, STEP, STEP, time).splitlines()
    one, two = (line for line in lines if line.startswith("time  "))
    assert "a step 20.0 s, the run 33.3 min" in one and one.endswith("if each GPU reaches 50%")
    assert "of its 165 TFLOP/s in bf16 (--mfu; an assumption" in two
    assert json.loads(to_json("x", CARDS["4090"], 2, STEP, STEP, time))["time"]["mfu"] == 0.5
    assert predict_time(script, CARDS["t4"], 1, {}, 0.4) is None
    assert "days; it is fit for the tiny scale only\n" in to_text("x", CARDS["t4"], 1, STEP, None)


@pytest.mark.parametrize("text", ["0", "1.01", "-1", "nan", "x"])
def test_a_share_of_the_peak_that_cannot_be(text, capsys):
    with pytest.raises(SystemExit):
        command.main(["01", "--mfu", text])
    assert "argument --mfu: " in capsys.readouterr().err


def test_a_table_for_one_gpu(monkeypatch):
    monkeypatch.setattr("speedrun.figures.one_gpu.run_flops",  # where nothing is stored: two hours
                        lambda script, settings: 0.4 * 165.2e12 * 7200)
    stored = invented("01", run_flops=0.4 * 165.2e12 * 36_000)  # ten hours on a 4090
    log = load_log(MANIFEST.history / "one_h100.toml")
    head, _, *lines = (line.strip("| ").split(" | ") for line in one_gpu_table(
        stored, MANIFEST, log).splitlines())
    rows = {line[0].split("]")[0].strip("["): line[1:] for line in lines}
    assert [*rows][0] == [m.id for m in MANIFEST.milestones if m.minutes][-1]
    assert [*rows][-1] == "00"
    assert rows["01"] == ["3", "1.7", "10", "5.3", "32 x 1,024", "33",
                          "4.58 at 250, 3.48 at 3,125, 3.28 at 6,200"]
    assert rows["14i"] == ["0.16", "**0.15**, another script's logs", "2", "1.1", "—", "5",
                           "4.47 at 250, 3.67 at 750, 3.28 at 1,285"]
    assert rows["00"][-1] == "—"
    assert len(rows) == 1 + sum(
        bool(m.is_station and m.minutes) for m in MANIFEST.milestones)


# ---- what is stored ----


def invented(*ids, **changes):
    """Predictions of today's scripts: 2 GiB and half a MiB for each token, so 34 GiB for 65,536."""
    return {MANIFEST.get(id).slug: replace(StoredPrediction(
        code_hash(MANIFEST.get(id).script), peak=34 * 2**30, fixed=2 * 2**30,
        per_token=2.0**19), **changes) for id in ids}


def test_a_file_is_read(tmp_path):
    file, wanted = tmp_path / "predictions.json", invented("00", "01")
    wanted |= invented("05", val_per_token=2.0**17)
    write_predictions(file, wanted)
    assert load_predictions(file) == wanted
    assert wanted["muon"].alone(4096) == 4 * 2**30
    for content, words in (("[]", "must be an object"), ("{", "predictions.json: Expec"),
                           ('{"x": {}}', 'x: missing key "code"')):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            load_predictions(file)


def test_what_another_call_has_predicted_meanwhile_is_kept(tmp_path, monkeypatch):
    path, asked, other = tmp_path / "predictions.json", [], invented("01")

    def predict(milestone):
        asked.append(milestone.id)
        write_predictions(path, other)
        return invented("00")["baseline"]

    monkeypatch.setattr(predictions, "make_prediction", predict)
    some = replace(MANIFEST, milestones=tuple(map(MANIFEST.get, ("00", "01"))))
    monkeypatch.setattr(predictions, "load_manifest", lambda: some)
    predict_stale(path)
    assert (asked, load_predictions(path)) == (["00"], invented("00") | other)


def test_bytes_that_a_rank_sends_in_a_ring():
    kinds = ("allreduce float32", "allgather float32", "reduce_scatter bfloat16")
    assert [predictions._ring_bytes(kind, 800) for kind in kinds] == [1400, 700, 700]


def test_staleness_is_found():
    some = replace(MANIFEST, milestones=MANIFEST.milestones[:5])
    ids = [m.id for m in some.milestones]
    stored = invented(*ids)
    assert stale_entries(stored, some) == []
    _, one, other, *_ = stored
    del stored[one]  # the table says that it is not predicted
    stored[other] = replace(stored[other], code="another")
    assert stale_entries(stored, some) == [
        f"{ids[2]}: the script has changed since it was predicted"]


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
        return replace(STEP, peaks={
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
