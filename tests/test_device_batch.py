"""The largest micro batch that fits: the search, on simulated devices, and trials on the CPU.

Run: .venv/bin/python -m pytest tests/test_device_batch.py
"""

import io
import os
import re
import sys
from dataclasses import replace

import pytest

import run_milestone
from nvidia_smi import fake_nvidia_smi
from snapshots import MANIFEST, MILESTONES, every_snapshot, micro_of
from speedrun.base.errors import UserError
from speedrun.history.fields import default_hyperparameters
from speedrun.history.glossary import KINDS
from speedrun.run import fit_batch, gpus
from speedrun.run.failure import Failure
from speedrun.run.fit_batch import fit_micro_batch, trial_options
from speedrun.run.log import read_log
from speedrun.run.plan import AUTO, Nodes, make_plan
from speedrun.run.preflight import check_values
from speedrun.scripts.sizes import fitting, length_names, micro_batches, trial_sizes, whole
from test_predictions import invented

GPU = "NVIDIA Simulated"


# ---- what divides ----


@pytest.mark.parametrize("batch, val_tokens, world_size, sizes", [
    (1200, 12000, 1, [1, 2, 3, 4, 6, 12]), (1200, 12000, 2, [1, 2, 3, 6]),
    (1200, 800, 1, [1, 2, 4]),  # a validation of eight sequences
    (1200, None, 4, [1, 3]), (1200, 1200, 5, []), (1200, 1250, 1, []), (None, 1200, 1, []),
])
def test_micro_batches_divide_a_step_and_a_validation(batch, val_tokens, world_size, sizes):
    hyperparameters = dict(total_batch_size=batch, val_tokens=val_tokens, seq_len=100)
    assert micro_batches(hyperparameters, world_size) == sizes


def test_whole_numbers():
    values = (7, "1_000", "2.5", "x", None, -1, True)
    assert [whole(value) for value in values] == [7, 1000] + [None] * 5


def test_training_and_validation_may_have_lengths_of_their_own():
    sizes = dict(total_batch_size=1200, val_tokens=1600, train_seq_len=100, val_seq_len=400)
    assert micro_batches(sizes, 1) == [1, 2, 4] and micro_batches(sizes, 2) == [1, 2]
    assert micro_batches({**sizes, "val_tokens": 500}, 1) == []
    del sizes["val_seq_len"]
    assert micro_batches(sizes, 1) == []
    sizes |= dict(val_seq_len=400, train_steps=9, micro_batch_size=1)
    assert trial_sizes(sizes, 3, 2) == dict(
        train_steps=2, micro_batch_size=3, total_batch_size=1200, val_tokens=2400)
    assert trial_sizes(sizes, 2, 2)["total_batch_size"] == 800


# ---- the GPUs' memory ----


posix = pytest.mark.skipif(os.name == "nt", reason="a script stands for nvidia-smi")


@posix
def test_memory_of_the_visible_gpus(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, *(
        {"name": name, "memory.total": mib}
        for name, mib in (("A", "24564"), ("B", "[N/A]"), ("C", "8192"))))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert gpus.visible_gpus() == ["C", "B"] and gpus.visible_memory() == [8192, 0]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpus.visible_memory() == [24564, 0, 8192]


# ---- a plan and its answer, with a stand-in for the trials ----

SIZES = dict(total_batch_size=24 * 32, val_tokens=24 * 32)  # 24 sequences
MIB_PER_SEQUENCE = 100


def write_log(plan, end):
    """The log of a trial, which has one step."""
    line = "step:2/2 val_loss:5.0000 train_time:2ms step_avg:1.00ms\n"
    (plan.out / "log.txt").write_text(line + end, encoding="utf-8")


class Trials:
    """Stands in for speedrun.run.execute.execute: devices of `memory` MiB run out of it."""

    def __init__(self, memory, stderr="torch.OutOfMemoryError: CUDA out of memory. Tried to"):
        self.memory = memory
        self.stderr = stderr
        self.micro_batches = []
        self.failure = Failure("rank 0 ended with exit code 1", 1)

    def __call__(self, plan, stream):
        self.micro_batches.append(plan.options["micro_batch_size"])
        needed = MIB_PER_SEQUENCE * plan.options["micro_batch_size"]
        if needed > self.memory:
            (plan.out / "stderr_rank0.txt").write_text("a warning\n", encoding="utf-8")
            (plan.out / "stderr_rank1.txt").write_text(self.stderr, encoding="utf-8")
            return self.failure
        write_log(plan, f"peak_memory:{needed}MiB\n")
        return None


@pytest.fixture
def machine(monkeypatch, tmp_path, shards):
    """Makes plans for a machine whose GPUs have the given MiB, and the trials on it."""
    monkeypatch.setattr(fit_batch, "CACHE", tmp_path / "runs" / "answers")
    monkeypatch.setattr("speedrun.run.fit_batch.load_predictions", lambda: {})

    def make(*memory, settings=(), trials=None, milestone=MILESTONES[1], **options):
        names = [GPU] * len(memory)
        monkeypatch.setattr("speedrun.run.plan.visible_gpus", lambda: names)
        monkeypatch.setattr(fit_batch, "visible_memory", lambda: list(memory))
        trials = trials or Trials(min(memory, default=0))
        monkeypatch.setattr(fit_batch, "execute", trials)
        fields = default_hyperparameters(milestone.script)
        overrides = micro_of(milestone, **SIZES)
        overrides |= fitting(dict(attention_kernel="dense"), fields)  # in float32
        fixed = overrides.keys() - {"micro_batch_size", "train_steps",
                                    *MANIFEST.glossary.of_kind("phase")}
        settings = [*(f"{name}={overrides[name]}" for name in fixed), *settings]
        options = dict(device_batch=AUTO, data=shards, out=tmp_path / "run") | options
        plan = make_plan(str(milestone.script), scale="tiny", settings=settings, **options)
        return plan, trials

    return make


def fit(plan, **options):
    """The micro batch that the plan gets, and the lines that were said about it."""
    stream = io.StringIO()
    fitted = fit_micro_batch(plan, stream, **options)
    return fitted.options.get("micro_batch_size"), stream.getvalue().splitlines()


def test_largest_divisor_within_the_margin(machine, monkeypatch):
    monkeypatch.setattr("test_device_batch.MIB_PER_SEQUENCE", 1000)
    plan, trials = machine(14_000)
    # of 14,000 MiB a trial may take 11,900: twelve sequences do not run out of memory, yet take
    # 12,000
    assert fit(plan) == (8, [
        "trying micro_batch_size 6: 5.9 GiB", "trying micro_batch_size 12: 11.7 GiB, too much",
        "trying micro_batch_size 8: 7.8 GiB",
        f"micro_batch_size: 8 (largest that fits {GPU}, 7.8 of 13.7 GiB)",
    ])
    assert plan.hyperparameters["total_batch_size"] == 24 * 32


@pytest.mark.parametrize("limit", range(1, 25))
def test_the_largest_is_found_in_few_trials(machine, limit):
    plan, trials = machine(10**6, trials=Trials(limit * MIB_PER_SEQUENCE))
    divisors = [n for n in range(1, 25) if 24 % n == 0]
    assert fit(plan)[0] == max(n for n in divisors if n <= limit)
    assert len(trials.micro_batches) <= 4 and {*trials.micro_batches} <= {*divisors}


def test_the_smallest_gpu_decides(machine):
    plan, _ = machine(80_000, 650)  # two ranks, 12 sequences each
    assert fit(plan)[0] == 4  # six fill it, and leave no margin
    plan, _ = machine(80_000, 650, nproc=1)  # the small one has no rank
    assert fit(plan, use_cache=False)[0] == 6  # but its trials run out of memory
    plan, _ = machine(80_000, 650, nproc=1, trials=Trials(80_000))
    assert fit(plan, use_cache=False)[0] == 24  # the whole batch


def test_an_answer_is_remembered(machine):
    plan, trials = machine(1400)
    assert fit(plan)[0] == 8 and len(trials.micro_batches) == 3
    answer = (8, [f"micro_batch_size: 8 (largest that fits {GPU}, 0.8 of 1.4 GiB; cached)"])
    assert fit(plan) == answer and fit(plan, search=False) == answer
    assert fit(plan, use_cache=False)[0] == 8 and len(trials.micro_batches) == 6
    plan, trials = machine(1400, settings=["seed=5"], steps=7)  # takes no more memory
    assert fit(plan) == answer and not trials.micro_batches


@pytest.mark.parametrize("change", [
    dict(settings=["model_dim=64"]), dict(settings=["total_batch_size=1536"]), dict(nproc=1),
    dict(milestone=MILESTONES[2]), "memory", "torch", "gpu",
])
def test_what_changes_the_memory_is_tried_again(machine, change, monkeypatch):
    fit(machine(1400, 1400)[0])
    if change == "torch":
        monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    if change == "gpu":
        monkeypatch.setattr("test_device_batch.GPU", "another")
    memory = 2000 if change == "memory" else 1400
    plan, trials = machine(memory, memory, **(change if isinstance(change, dict) else {}))
    fit(plan)
    assert trials.micro_batches


def test_a_script_that_was_edited_is_tried_again(machine, tmp_path):
    plan, trials = machine(1400)
    script = tmp_path / "train_gpt.py"
    plan = replace(plan, script=replace(plan.script, path=script))
    for text, tried in (("a", 3), ("a", 3), ("b", 6)):
        script.write_text(text, encoding="utf-8")
        assert fit(plan)[0] == 8 and len(trials.micro_batches) == tried


@pytest.mark.parametrize("content", [b"{", b"8", b'["8", 1]', b"\xff\xfe", b"[5, 1]"])  # 24 % 5
def test_a_broken_answer_counts_as_none(machine, content):
    plan, trials = machine(1400)
    fit(plan)
    (answer,) = fit_batch.CACHE.iterdir()
    answer.write_bytes(content)
    assert fit(plan)[0] == 8 and len(trials.micro_batches) == 6
    assert fit(plan)[1][-1].endswith("; cached)")
    assert list(fit_batch.CACHE.iterdir()) == [answer]


def test_an_answer_that_cannot_be_written_stops_nothing(machine, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(fit_batch, "CACHE", tmp_path / "file" / "answers")
    best, lines = fit(machine(1400)[0])
    assert best == 8 and "; not remembered: " in lines[-1]


def test_a_dry_run_tries_nothing(machine):
    plan, trials = machine(1400)
    usual = plan.hyperparameters["micro_batch_size"]
    best, lines = fit(plan, search=False)
    assert best == usual and not trials.micro_batches
    assert lines == [f"micro_batch_size: {usual} (there is no prediction for this script with its "
                     "settings; a dry run tries nothing)"]


@pytest.fixture
def predicted(monkeypatch):
    """Predictions of 2 GiB, and 16 MiB for each sequence of 32 tokens, whatever the settings."""
    stored = invented(*(milestone.id for milestone in MILESTONES[:2]))
    monkeypatch.setattr("speedrun.run.fit_batch.load_predictions", lambda: stored)
    monkeypatch.setattr("speedrun.run.fit_batch.MAY_DIFFER", KINDS)
    return stored


def test_a_dry_run_says_what_is_predicted_to_fit(machine, predicted):
    plan, trials = machine(2548)  # 85 % are 2,166 MiB: of the divisors of 24, six sequences fit
    assert fit(plan, search=False) == (6, [
        "micro_batch_size: 6 (predicted to fit: 2.1 of 2.5 GiB; a dry run tries nothing)"])
    plan, _ = machine(2420)  # 9 MiB for sequences
    assert fit(plan, search=False) == (4, [
        "micro_batch_size: 4 (not even one sequence of 32 tokens is predicted to fit, but --set "
        "seq_len=16; a dry run tries nothing)"])
    plan, _ = machine(2400)  # less than the 2,048 MiB without sequences
    assert fit(plan, search=False) == (4, [
        "micro_batch_size: 4 (not even one token is predicted to fit; a dry run tries nothing)"])
    assert not trials.micro_batches


def test_a_prediction_is_said_before_trials_and_tried_like_any_other(machine, predicted):
    plan, trials = machine(2548, trials=Trials(1400))
    best, lines = fit(plan)
    assert lines[0] == "micro_batch_size 6: predicted to fit: 2.1 of 2.5 GiB"
    assert best == 12 and trials.micro_batches == [6, 12, 24]


def test_without_a_gpu_every_size_is_predicted(machine, predicted):
    predictions = dict(predicted)
    predicted.clear()
    plan, trials = machine()
    assert fit(plan) == (4, ["micro_batch_size: 4 (--device-batch auto needs a GPU)"])
    assert not trials.micro_batches
    predicted.update(predictions)
    text = ", ".join(f"{n} x 1,024 in {gib} GiB" for gib, n in (
        (12, 16), (16, 16), (24, 32), (32, 32), (80, 128)))
    assert fit(machine(milestone=MILESTONES[1])[0]) == (4, [
        "micro_batch_size: 4 (--device-batch auto needs a GPU; sequences x tokens predicted to fit"
        f" one at record scale: {text})"])
    predicted.update(invented(MILESTONES[1].id, fixed=12 * 2**30))
    assert "at record scale: none in 12 GiB, " in fit(machine(milestone=MILESTONES[1])[0])[1][0]


@pytest.mark.parametrize("options", [dict(settings=["micro_batch_size=2"]), dict(device_batch=2)])
def test_a_number_has_the_last_word(machine, options):
    plan, trials = machine(1400, **options)
    best, lines = fit(plan)
    assert int(best) == 2 and not lines and not trials.micro_batches


def test_refusals_are_one_line(machine, monkeypatch, tmp_path):
    wrong = []

    def refused(pattern, *arguments, status=None, **options):
        try:
            said = fit(machine(*arguments, **options)[0])
        except UserError as caught:
            said = f"{caught}" if status in (None, caught.status) else f"status {caught.status}"
        if not isinstance(said, str) or not re.search(pattern, said) or "\n" in said:
            wrong.append(f"{pattern}: {said}")

    refused(rf"not even one sequence of 32 tokens fits into 85% of the 0.1 GiB of {GPU}; try --set"
            " seq_len=16 or a smaller model_dim", 99)
    refused("not even one sequence", 110)  # it takes 100 of them
    refused("one machine", 1400, nodes=Nodes(2, 0, "host:1"))
    refused("nvidia-smi does not report", 0)
    crash = Trials(500, stderr="ValueError: x")
    refused("rank 0 ended", 1400, trials=crash, status=1)
    stop = Trials(500)  # whatever the ranks say while they are stopped
    stop.failure = Failure("interrupted", 130, stopped=True)
    refused("^interrupted$", 1400, trials=stop, status=130)
    silent = lambda plan, stream: write_log(plan, "")  # noqa: E731
    refused("without a line peak_memory", 1400, trials=silent)
    assert not wrong
    assert not fit_batch.CACHE.exists()


def test_a_script_without_the_sizes(machine, tmp_path):
    plan, _ = machine(1400)
    script = tmp_path / "other" / "train_gpt.py"
    script.parent.mkdir()
    script.write_text("from sys import argv\n\nclass Hyperparameters:\n    train_files: str = ''\n"
                      "    val_files: str = ''\n"
                      "    seq_len: int = 8\n", encoding="utf-8")
    plan = make_plan(str(script), device_batch=AUTO, data=plan.data, out=tmp_path / "run")
    with pytest.raises(UserError, match="has no micro_batch_size, total_batch_size, train_steps"):
        fit(plan)


# ---- real trials ----


@every_snapshot
def test_every_milestone_can_be_tried(milestone, machine):
    sizes = fitting(dict(tile_size=128), default_hyperparameters(milestone.script))
    tiles = [f"{name}={size}" for name, size in sizes.items()]
    plan, _ = machine(1400, milestone=milestone, settings=["kernel_warmup_steps=3", *tiles],
                      save_checkpoint=True)
    trial = replace(plan, options=trial_options(plan, 6)).hyperparameters
    check_values(trial, plan.script.hyperparameters, world_size=1, on_gpu=True)
    assert (trial["micro_batch_size"], trial["kernel_warmup_steps"]) == (6, 2)
    assert trial["save_checkpoint"] is False
    length, val_length = (trial[name] for name in length_names(trial))
    assert (trial["total_batch_size"], trial["val_tokens"]) == (2 * 6 * length, 6 * val_length)
    assert length == 32
    assert trial_options(plan, 24)["total_batch_size"] == 24 * 32  # no more than the run's own


def simulated(tmp_path, limit):
    """Milestone 00 on a CPU that runs out of memory in the backward pass of more than `limit`
    sequences, and tells of 100 MiB for each."""
    text = MILESTONES[0].script.read_text(encoding="utf-8")
    backward = "            (loss / grad_accum_steps).backward()\n"
    memory = '        log.print0(f"peak_memory:'
    for old, new in [
        ("torch.cuda.is_available()", "False"),
        (backward, f"{backward}            if args.micro_batch_size > {limit}:\n"
         "                raise torch.OutOfMemoryError('CUDA out of memory. Tried to')\n"),
        (f'    if device.type == "cuda":\n{memory}', f"    if True:\n{memory}"),
        ("torch.cuda.max_memory_allocated()", "100 * args.micro_batch_size * 2**20"),
    ]:
        assert old in text
        text = text.replace(old, new)
    script = tmp_path / "simulated" / "train_gpt.py"
    script.parent.mkdir()
    script.write_text(text, encoding="utf-8")
    return script


@posix
@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, shards, capfd):
    script = simulated(tmp_path, limit=1)
    fake_nvidia_smi(tmp_path, monkeypatch, *[{"name": GPU, "memory.total": "1000"}] * 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(fit_batch, "CACHE", tmp_path / "answers")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(fit_batch.tempfile, "tempdir", str(temporary))
    settings = micro_of(MANIFEST.get("00"), total_batch_size=4 * 32, val_tokens=4 * 32,
                        train_steps=3, kernel_warmup_steps=0)
    del settings["micro_batch_size"]
    command = ["run_milestone.py", script, "--data", shards, "--device-batch", "auto",
               *(f"--set={name}={value}" for name, value in settings.items())]

    def run(*more):
        monkeypatch.setattr(sys, "argv", [str(word) for word in (*command, *more)])
        assert run_milestone.main() == 0
        return capfd.readouterr()

    lines = run("--out", tmp_path / "run").out.splitlines()
    answer = f"micro_batch_size: 1 (largest that fits {GPU}, 0.1 of 1.0 GiB"
    # the record's 32 is more than the two sequences that each rank has
    assert lines[1:4] == [
        "trying micro_batch_size 2: out of memory", "trying micro_batch_size 1: 0.1 GiB",
        f"{answer})"]
    log = read_log(tmp_path / "run" / "log.txt")
    assert log.hyperparameters["micro_batch_size"] == 1 and log.environment["world_size"] == 2
    assert log.hyperparameters["total_batch_size"] == 4 * 32 and log.last.step == 3
    assert not list(temporary.iterdir())

    seen = run("--dry-run")
    assert "--micro_batch_size=1" in seen.out and f"{answer}; cached)" in seen.err.splitlines()
