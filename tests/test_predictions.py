"""What predictions report, and the stored ones: read, judged, shown.

Run: .venv/bin/python -m pytest tests/test_predictions.py
"""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

import predict as command
from speedrun.figures import predictions
from speedrun.figures.one_gpu import load_log, one_gpu_table
from speedrun.figures.predictions import (
    make_prediction,
    memory_alone,
    memory_table,
    predict_stale,
    stale_entries,
    write_predictions,
)
from speedrun.history.manifest import load_manifest
from speedrun.history.predictions import StoredPrediction, load_predictions
from speedrun.predict import runs
from speedrun.predict.cards import CARDS, Card
from speedrun.predict.prediction import Kernel, Launch, Prediction, Time
from speedrun.predict.report import (
    COMPILED_LEFT_OUT,
    LEFT_OUT,
    LEGEND,
    span,
    to_columns,
    to_json,
    to_text,
)
from speedrun.predict.runs import largest_micro_batch, observe, predict_time
from speedrun.run.fit_batch import find_prediction, largest_predicted
from speedrun.scripts.find import code_hash, find_script
from speedrun.scripts.sizes import length_names

H100 = CARDS["h100"]
MANIFEST = load_manifest().of_chain()
STEP = Prediction(micro_batch=3, micro_steps=1, peaks={"training": 2**30}, memory={},
                  flops={"bfloat16": 2e12}, moved=3e12,
                  collectives={"allreduce float32": 1e6, "allgather bf16": 2.5e6})


# ---- what a report says ----


def test_a_report_of_a_compiled_step():
    launches = (
        Launch("forward", "library", "mm", 2e9, 1e12, "bfloat16"),
        Launch("forward", "library", "_varlen_attn", 1e9, 2e12, "bfloat16"),
        Launch("backward", "triton", "triton_tem_fused_flex_attention", 7e9, 4e12, "bfloat16"),
        Launch("backward", "triton", "triton_poi_0", 3e9, 0, None),
        Launch("backward", "eager", "add", 4e9, 0, None),
        *2 * [Launch("optimizer", "library", "bmm", 5e9, 3e12, "bfloat16")])
    kernels = (Kernel("small", 254, 0, 209_203), Kernel("near", 64, 0, 209_204),
               Kernel("full", 255, 0, 232_448), *2 * [Kernel("large", 32, 48, 232_449)])
    step = replace(
        STEP, graphs=9, recompiled=2, launches=launches, kernels=kernels, saved=3 * 2**29,
        peaks={"warm-up": 2**30, "training": 3 * 2**30}, memory={"parameters": 2**29, "states": 0},
        flops={"bfloat16": 2e12, "float32": 1e11})
    time = Time(0.5, 3600, 0.4, 989.5e12)
    assert to_text("x", H100, 8, step, None, time).splitlines() == [
        "x on 8 x NVIDIA H100 80GB HBM3, 3 sequences per forward pass; compiled",
        "peak memory      3.0 GiB of 80.0 GiB: fits",
        "  warm-up        1.0 GiB", "  training       3.0 GiB",
        "what stays       parameters 0.5 GiB, states 0.0 GiB",
        "largest batch    not even one sequence leaves 15% free",
        "time             a step 500 ms, the run 60.0 min, without validation, if each GPU reaches"
        " 40%",
        "time             of its 990 TFLOP/s in bf16 (--mfu; an assumption: nothing was timed)",
        "a step of a rank", "  products       2.0 TFLOP in bfloat16",
        "  products       0.1 TFLOP in float32", "  memory traffic 3.00 TB",
        "  allreduce float32 1.0 MB", "  allgather bf16 2.5 MB",
        "  saved          1.5 GiB from a forward pass to its backward pass",
        "launches         of one forward and backward pass, and of the optimizer",
        "  products           1      2.0 GB     1.0 TFLOP",
        "  attention          2      8.0 GB     6.0 TFLOP",
        "  fused              1      3.0 GB     0.0 TFLOP",
        "  other              1      4.0 GB     0.0 TFLOP",
        "  optimizer          2     10.0 GB     6.0 TFLOP",
        "graphs           9, 2 of them after the warm-up",
        "kernels          5 of Triton's: 2 of them do not fit, 2 spill",
        "  near", "    64 registers, 0 bytes spilled, 209,204 of 232,448 bytes shared",
        "  full", "    255 registers, 0 bytes spilled, 232,448 of 232,448 bytes shared",
        "  large", "    32 registers, 48 bytes spilled, 232,449 of 232,448 bytes shared",
        *COMPILED_LEFT_OUT]
    groups = {"products": (1, 2e9, 1e12), "attention": (2, 8e9, 6e12), "fused": (1, 3e9, 0),
              "other": (1, 4e9, 0), "optimizer": (2, 10e9, 6e12)}
    assert json.loads(to_json("x", H100, 8, step, None, time)) == json.loads(json.dumps(
        asdict(step) | dict(
            script="x", gpu="NVIDIA H100 80GB HBM3", world_size=8, launches={
                group: dict(launches=count, moved=moved, flops=flops)
                for group, (count, moved, flops) in groups.items()},
            largest_micro_batch=None, time=dict(step_s=0.5, run_s=3600, mfu=0.4, peak=989.5e12))))


def test_a_report_of_a_step_operator_by_operator():
    largest = replace(STEP, micro_batch=4, peaks={"training": 5 * 2**30})
    lines = to_text("x", H100, 1, STEP, largest).splitlines()
    assert lines[0].endswith("x on 1 x NVIDIA H100 80GB HBM3, 3 sequences per forward pass; "
                             "operator by operator")
    assert "largest batch    4 sequences per forward pass, 5.0 GiB" in lines
    assert lines[-3:] == [
        "launches         of one forward and backward pass, and of the optimizer", *LEFT_OUT]
    assert json.loads(to_json("x", H100, 8, STEP, largest))["largest_micro_batch"] == 4
    assert "leaves 15% free operator by operator; may still" in to_text("x", H100, 8, STEP, None)
    again = to_text("x", H100, 8, replace(STEP, graphs=3, kernels=(Kernel("a", 1, 0, 1),)), STEP)
    assert ("graphs           3, none of them after the warm-up\n"
            "kernels          1 of Triton's: all fit, 0 spill\nCompiled by") in again


def test_the_columns_of_a_table():
    other = replace(STEP, micro_batch=64, peaks={"training": 2**32}, saved=3 * 2**29, moved=5e12,
                    launches=(Launch("forward", "eager", "add", 1, 0, None),) * 1234,
                    flops={"bfloat16": 2e12, "float32": 5e12})
    time = Time(0.5, 3600, 0.4, 989e12)
    columns = to_columns({"x": STEP, "y": other}, {"y": time, "x": None})
    assert columns == {"": ["x", "y"], "rows": ["3", "64"], "peak": ["1.0 GiB", "4.0 GiB"],
                       "run": ["—", "60.0 min"], "saved": ["0.0 GiB", "1.5 GiB"],
                       "launches": ["0", "1,234"], "products": ["2.0 TFLOP", "7.0 TFLOP"],
                       "traffic": ["3.00 TB", "5.00 TB"], "collectives": ["3.5 MB", "3.5 MB"]}


@pytest.mark.parametrize(("gib", "graphs", "compiles", "said"), [
    (68, 0, True, "68.0 GiB of 80.0 GiB: fits\n"),
    (68.01, 1, True, "fits, with less than 15% to spare\n"),
    (80, 1, True, "fits, with less than 15% to spare\n"),
    (80.01, 1, True, ": does not fit\n"),
    (150, 0, True, ": too much operator by operator; may still fit, because a run's compiled code"
     " needs less (--compiled predicts it)\n"),
    (150, 0, False, ": does not fit\n"),  # a run of the script does not compile it either
])
def test_only_a_peak_beyond_the_card_does_not_fit(gib, graphs, compiles, said):
    step = replace(STEP, peaks={"training": gib * 2**30}, graphs=graphs)
    assert said in to_text("x", H100, 8, step, step, compiles=compiles)


@pytest.mark.parametrize(("seconds", "text"), [
    (0.4264, "426 ms"), (0.999, "999 ms"), (1, "1.0 s"), (89, "89.0 s"), (90, "1.5 min"),
    (5394, "89.9 min"), (5400, "1.5 h"), (172_440, "47.9 h"), (172_800, "2.0 days")])
def test_a_span_of_time(seconds, text):
    assert span(seconds) == text


def test_the_time_of_a_run_is_its_arithmetic_by_a_share_of_the_peak(monkeypatch):
    monkeypatch.setattr("speedrun.scripts.flops.training_flops_per_token",
                        lambda script, values: 1e9 * values.get("num_layers", 1))
    script = SimpleNamespace(path=None, hyperparameters=dict(
        train_steps=100, total_batch_size=1_652_000, num_layers=2))
    time = predict_time(script, CARDS["4090"], 2, {}, 0.5)  # 165.2 TFLOP/s
    assert (time.step_s, time.run_s) == (pytest.approx(20.0), pytest.approx(2000.0))
    half = predict_time(script, CARDS["4090"], 1, {"num_layers": 1, "train_steps": 7}, 0.5)
    assert (half.step_s, half.run_s) == (pytest.approx(20.0), pytest.approx(140.0))
    lines = to_text("x", CARDS["4090"], 2, STEP, STEP, time).splitlines()
    one, two = (line for line in lines if line.startswith("time  "))
    assert "a step 20.0 s, the run 33.3 min" in one and one.endswith("if each GPU reaches 50%")
    assert "of its 165 TFLOP/s in bf16 (--mfu; an assumption" in two
    assert json.loads(to_json("x", CARDS["4090"], 2, STEP, STEP, time))["time"]["mfu"] == 0.5
    assert predict_time(script, CARDS["4090"], 2, {"train_steps": 0}, 0.5).step_s == 0
    assert predict_time(script, CARDS["t4"], 1, {}, 0.4) is None
    assert "days; it is fit for the tiny scale only\n" in to_text("x", CARDS["t4"], 1, STEP, None)


@pytest.mark.parametrize("text", ["0", "1.01", "-1", "nan", "x"])
def test_a_share_of_the_peak_that_cannot_be(text, capsys):
    with pytest.raises(SystemExit):
        command.main(["01", "--mfu", text])
    assert capsys.readouterr().err == (
        f"error: argument --mfu: {text} is not a share above 0 and up to 1; see --help\n")


@pytest.fixture
def told(monkeypatch):
    """What stands for predictions in the command: 30 GiB and an hour; and all that is asked."""
    asked, step = [], replace(STEP, peaks={"training": 30 * 2**30})

    def said(name, answer):
        monkeypatch.setattr(runs, name, lambda script, *given: asked.append(
            (name, script.milestone.id, *given)) or answer)

    time = Time(0.5, 3600, 0.4, 989e12)
    said("predict", step), said("predict_time", time), said("largest_micro_batch", STEP)
    return asked, step, time


def test_the_command_asks_for_what_its_options_say(told, capsys):
    asked, step, time = told
    how = CARDS["4090"], 2, {"micro_batch_size": 4, "seq_len": 512}
    assert command.main("01 --gpu 4090 --nproc 2 --device-batch 4 --set seq_len=512 --compiled "
                        "--mfu 0.5".split()) == 0
    assert asked == [("predict", "01", *how, True), ("predict_time", "01", *how, 0.5),
                     ("largest_micro_batch", "01", *how, True)]
    assert capsys.readouterr().out == to_text("muon", *how[:2], step, STEP, time) + "\n"
    asked.clear()
    command.main(["p0", "--gpu", "4090"])
    assert asked == [("predict", "p0", CARDS["4090"], 8, {}, False),
                     ("predict_time", "p0", CARDS["4090"], 8, {}, 0.4),
                     ("largest_micro_batch", "p0", CARDS["4090"], 8, {}, False)]
    assert "30.0 GiB of 24.0 GiB: does not fit\n" in capsys.readouterr().out


def test_the_command_gives_a_table_or_json_of_several_targets(told, capsys):
    asked, step, time = told
    command.main(["01", "00", "--mfu", "1"])
    *table, card = capsys.readouterr().out.removesuffix(LEGEND.format(mfu=1) + "\n").splitlines()
    assert card == "8 x NVIDIA H100 80GB HBM3"
    assert [" ".join(line.split()) for line in table] == [
        "rows peak run saved launches products traffic collectives",
        *(f"{name} 3 30.0 GiB 60.0 min 0.0 GiB 0 2.0 TFLOP 3.00 TB 3.5 MB"
          for name in ("muon", "baseline"))]
    command.main(["01", "00", "--json"])
    assert capsys.readouterr().out.splitlines() == [
        to_json(name, H100, 8, step, STEP, time) for name in ("muon", "baseline")]


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


# ---- what is run ----


def test_what_a_fake_run_saw_is_told_of_one_step(monkeypatch):
    training = dict(peak=2, graphs=9, memory={"parameters": 6}, flops={"bfloat16": 8}, moved=10,
                    collectives={"allreduce float32": 12})
    seen = {"micro_batch": 4, "kernels": ["kernel"], "launches": ["launch"], "saved": 5,
            "warm-up": dict(peak=1, graphs=7), "validation": dict(peak=3, graphs=11),
            "training": training}
    script, asked = find_script("01"), []
    monkeypatch.setattr(runs, "_apart", lambda *given: asked.append(given) or seen)
    sizes = {"micro_batch_size": 4, "total_batch_size": 3 * 2 * 4 * 1024}
    assert observe(script, H100, 2, sizes, True) == Prediction(
        micro_batch=4, micro_steps=3, peaks={"warm-up": 1, "training": 2, "validation": 3},
        memory={"parameters": 6}, flops={"bfloat16": 4}, moved=5,  # of two steps
        collectives={"allreduce float32": 6}, launches=("launch",), saved=5, graphs=9, recompiled=2,
        kernels=("kernel",))
    assert asked == [(script, True, False, 2, H100, "--micro_batch_size=4",
                      "--total_batch_size=24576")]
    two = SimpleNamespace(hyperparameters=dict(train_seq_len=4, val_seq_len=16, micro_batch_size=3))
    assert runs._micro_steps(two, 2, {"total_batch_size": 72}) == (24, 3)


@pytest.mark.parametrize(("batch", "gib", "bend", "largest", "looks"), [
    (65_536, 20, 99, 16, [16]),  # 17 GiB, which is 85 %
    (65_536, 19.99, 99, 8, [8]), (65_536, 20, 16, 8, [16, 8]), (65_536, 80, 99, 32, [32]),
    (65_536, 2.3, 99, None, []), (2048, 20, 99, 1, None), (2048, 2.3, 99, None, None),
    (5000, 80, 99, 16, None)])  # what does not divide is run, so that it is refused
def test_the_largest_micro_batch_lies_on_a_line(batch, gib, bend, largest, looks, monkeypatch):
    """On each of two ranks a sequence takes 1 GiB, beside 1 and, from `bend` sequences on, 1."""
    asked = []

    def observed(script, card, world_size, settings, compiled):
        rows = settings["micro_batch_size"]
        assert settings["total_batch_size"] == min(2 * rows * 2048, batch) and settings["seed"] == 7
        asked.append(rows)
        peaks = {"training": (1 + rows + (rows >= bend)) * 2**30}
        return replace(STEP, micro_batch=rows, peaks=peaks)

    monkeypatch.setattr(runs, "observe", observed)
    script = SimpleNamespace(hyperparameters=dict(
        seq_len=1024, micro_batch_size=16, total_batch_size=batch, val_tokens=batch))
    found = largest_micro_batch(script, Card("x", gib * 2**30, 90, 1), 2, {"seed": 7}, True)
    assert (found and found.micro_batch) == largest
    assert looks is None or (sorted(asked[:2]), asked[2:]) == ([1, 4], looks)


def test_cards_are_those_of_nvidias_tables():
    assert [f"{key} {card.memory / 2**30:.1f} {card.sm} {card.multiprocessors} {card.shared >> 10} "
            f"{card.threads} {card.name}" for key, card in CARDS.items()] == [
        "h100 80.0 90 132 227 2048 NVIDIA H100 80GB HBM3",
        "h200 131.3 90 132 227 2048 NVIDIA H200", "b200 167.6 100 148 227 2048 NVIDIA B200",
        "a100 80.0 80 108 163 2048 NVIDIA A100-SXM4-80GB",
        "l40s 48.0 89 142 99 1536 NVIDIA L40S",
        "rtx6000ada 48.0 89 142 99 1536 NVIDIA RTX 6000 Ada Generation",
        "5090 32.0 120 170 99 1536 NVIDIA GeForce RTX 5090",
        "4090 24.0 89 128 99 1536 NVIDIA GeForce RTX 4090",
        "3090 24.0 86 82 99 1536 NVIDIA GeForce RTX 3090", "l4 24.0 89 58 99 1536 NVIDIA L4",
        "t4 15.0 75 40 64 1024 Tesla T4"]
    assert [key for key, card in CARDS.items() if not card.bf16] == ["t4"]


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
    text = file.read_text(encoding="utf-8")
    assert text.startswith('{\n "baseline": {\n  "code"') and text.endswith(" }\n}\n")
    assert '"saved"' not in text and text.count('"val_per_token"') == 1
    assert wanted["muon"].alone(4096) == 4 * 2**30
    for content, words in (("[]", "must be an object"), ("{", "predictions.json: Expec"),
                           ('{"x": {}}', 'x: missing key "code"')):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            load_predictions(file)


def test_what_another_call_has_predicted_meanwhile_is_kept(tmp_path, monkeypatch, capsys):
    path, other = tmp_path / "predictions.json", invented("02", code="another") | invented("01")

    def predict(milestone):
        if milestone is MANIFEST.get("00"):
            write_predictions(path, other)
        return invented(milestone.id)[milestone.slug]

    monkeypatch.setattr(predictions, "make_prediction", predict)
    some = replace(MANIFEST, milestones=tuple(map(MANIFEST.get, ("00", "01", "02"))))
    monkeypatch.setattr(predictions, "load_manifest", lambda: some)
    predict_stale(path)
    assert [*load_predictions(path).items()] == [*invented("00", "01", "02").items()]
    assert capsys.readouterr().out == (
        "predicting 00: not predicted\n"
        "predicting 02: the script has changed since it was predicted\n")


def test_what_is_stored_is_of_the_record_and_of_one_gpu(monkeypatch):
    m, (one,) = MANIFEST.get("01"), [Launch("forward", "eager", "add", 1, 0, None)]
    sent = {"allreduce float32": 800, "allgather float32": 80, "reduce_scatter bfloat16": 168}
    step = replace(STEP, peaks={"training": 5, "validation": 7}, saved=11, collectives=sent,
                   memory={"parameters": 2, "optimizer state": 13}, launches=(
                       one, replace(one, phase="backward"), *3 * [replace(one, phase="optimizer")]))

    def observed(script, *given, compiled):
        assert (script.path, *given, compiled) == (m.script, H100, 8, {}, True)
        return step

    monkeypatch.setattr(predictions, "observe", observed)
    monkeypatch.setattr(predictions, "memory_alone", lambda _: dict(fixed=17, per_token=1.5))
    monkeypatch.setattr(predictions, "run_flops", lambda *_: 19.0)
    assert make_prediction(m) == StoredPrediction(
        code_hash(m.script), peak=7, fixed=17, per_token=1.5, saved=11, pass_launches=2,
        optimizer_launches=3, optimizer_state=13, run_flops=19.0,
        sent=1400 + 70 + 147)  # in a ring of eight, seven eighths; of an all-reduce twice


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
    line = memory_table(invented("01", "05"), MANIFEST).splitlines()
    # 85 % of 12, 16, 24, 32, 80 GiB, less 2: 8.2, 11.6, 18.4, 25.2, 66 GiB, 2,048 tokens each
    assert line == [
        "| milestones | 12 GB | 16 GB | 24 GB | 32 GB | 80 GB |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
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
    ({"train_seq_len": 49_152, "val_seq_len": 262_144}, {"val_per_token": 2**17 + 0.3})])
def test_two_runs_tell_the_memory_of_one_gpu(own, stored, monkeypatch):
    def observed(script, card, world_size, sizes, compiled):
        assert sizes.keys() == {*own, "micro_batch_size", "total_batch_size"} and world_size == 1
        train, val = (sizes["micro_batch_size"] * sizes[name] for name in length_names(own))
        assert sizes["total_batch_size"] == 2 * train and train == val in (8192, 49_152, 65_536)
        return replace(STEP, peaks={
            "training": 2**31 + 0.4 + (2**19 + 0.26) * train,
            "validation": 2**30 + (2**17 + 0.26) * val})

    monkeypatch.setattr("speedrun.figures.predictions.observe", observed)
    assert memory_alone(SimpleNamespace(hyperparameters=own)) == {
        "fixed": 2**31, "per_token": 2**19 + 0.3, **stored}


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
