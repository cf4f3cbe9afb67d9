"""Finds the largest micro batch that fits into the memory of the GPUs: by short trials or, if
none can run, from the stored predictions.

A trial is the run itself, on all of its ranks, cut to two steps, in processes of its own. It fits
if no rank runs out of memory and rank 0's tensors take no more than MARGIN of the smallest GPU.
"""

import hashlib
import importlib.metadata
import io
import json
import math
import re
import tempfile
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from speedrun.base.errors import UserError
from speedrun.base.files import read_json, replace_file
from speedrun.history.glossary import load_glossary
from speedrun.history.manifest import REPOSITORY
from speedrun.history.predictions import StoredPrediction, load_predictions
from speedrun.run.execute import execute
from speedrun.run.gpus import visible_memory
from speedrun.run.log import read_log
from speedrun.run.plan import Plan
from speedrun.scripts.find import Script, code_hash
from speedrun.scripts.sizes import length_names, micro_batches, trial_sizes

MARGIN = 0.85  # the rest is for CUDA, NCCL, the gaps between tensors, a desktop
SIZES = (12, 16, 24, 32, 80)  # GiB of GPUs; the records' have the last
CACHE = REPOSITORY / "runs" / ".device_batch"  # a file [micro batch, its peak in MiB] per answer
TAKE_NO_MEMORY = ("files", "seed", "phase")  # kinds of hyperparameters
# Kinds of hyperparameters that leave a prediction's bytes per token as they are.
MAY_DIFFER = ("files", "batch", "length", "train length", "val length", "steps", "phase",
              "interval", "output", "seed")
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|STATUS_ALLOC_FAILED", re.IGNORECASE)


def fit_micro_batch(
    plan: Plan, stream: TextIO, search: bool = True, use_cache: bool = True
) -> Plan:
    """The plan with the largest micro_batch_size that fits its GPUs, if the plan asks for it.

    search: whether trials may run, instead of using a stored prediction; use_cache: whether to use
    an earlier answer. The answer, each trial, what is predicted, and why the plan's own micro batch
    stays (no GPU, neither search nor prediction) are lines on the stream. Raises UserError if not
    even one sequence fits, if a trial fails for another reason or is stopped, and for a plan that
    cannot be tried.
    """
    if not plan.auto_batch:
        return plan
    usual = plan.hyperparameters.get("micro_batch_size")
    if not plan.gpus:
        print(f"micro_batch_size: {usual} (--device-batch auto needs a GPU{_for_others(plan)})",
              file=stream)
        return plan
    candidates, memory = _candidates(plan)
    names = ", ".join(dict.fromkeys(plan.gpus[: plan.nproc]))
    answer, cached = CACHE / f"{_key(plan, candidates, memory)}.json", "; cached"
    match read_json(answer) if use_cache else None:
        case [int(best), int(peak)] if best in candidates:
            pass
        case _ if not search:
            best, why = _predict(plan, memory)
            print(f"micro_batch_size: {best or usual} ({why}; a dry run tries nothing)",
                  file=stream)
            return _with_micro_batch(plan, best) if best else plan
        case _:
            best, why = _predict(plan, memory)
            if best:
                print(f"micro_batch_size {best}: {why}", file=stream)
            best, peak = _search(plan, candidates, memory, names, stream)
            try:
                CACHE.mkdir(parents=True, exist_ok=True)
                replace_file(answer, json.dumps([best, peak]).encode())
                cached = ""
            except (OSError, UserError) as error:  # it serves this run all the same
                cached = f"; not remembered: {error}"
    used = f"{peak / 1024:.1f} of {memory / 1024:.1f} GiB"
    print(f"micro_batch_size: {best} (largest that fits {names}, {used}{cached})",
          file=stream, flush=True)
    return _with_micro_batch(plan, best)


def trial_options(plan: Plan, micro_batch: int) -> dict[str, object]:
    """The hyperparameters that the script gets in a trial of `micro_batch` sequences."""
    return {**plan.options, **trial_sizes(plan.hyperparameters, micro_batch, plan.nproc)}


def _with_micro_batch(plan, micro_batch):
    return replace(plan, options={**plan.options, "micro_batch_size": micro_batch},
                   auto_batch=False)


def _predict(plan, memory):
    """The micro batch that is predicted to fit into `memory` MiB, or None, and a remark on it."""
    prediction = find_prediction(plan.script, plan.options)
    if prediction is None:
        return None, "there is no prediction for this script with its settings"
    own = plan.hyperparameters
    found = largest_predicted(prediction, own, plan.nproc, MARGIN * memory * 2**20)
    if found is None:
        return None, "not even one token is predicted to fit"
    if shorter := found.shortened(own):
        lengths = " / ".join(str(own[name]) for name in found.lengths)
        return None, (f"not even one sequence of {lengths} tokens is predicted to fit, but"
                      f"{shorter}")
    used = f"{found.peak / 2**30:.1f} of {memory / 1024:.1f} GiB"
    return found.sequences, f"predicted to fit: {used}"


def _for_others(plan):
    """What is predicted to fit one GPU of each size at record scale, as the end of a remark."""
    prediction = find_prediction(plan.script, {})
    if prediction is None:
        return ""
    own = plan.script.hyperparameters
    fitting = ((gib, largest_predicted(prediction, own, 1, MARGIN * gib * 2**30)) for gib in SIZES)
    return "; sequences x tokens predicted to fit one at record scale: " + ", ".join(
        f"{found or 'none'} in {gib} GiB" for gib, found in fitting)


def _candidates(plan):
    """The micro batches to choose from, and the memory in MiB of the smallest GPU of the run;
    UserError if the plan cannot be tried."""
    known = plan.script.hyperparameters
    needed = ("micro_batch_size", "total_batch_size", "train_steps", *length_names(known))
    missing = [name for name in dict.fromkeys(needed) if name not in known]
    if missing:
        raise UserError(f"--device-batch auto: {plan.script.path} has no {', '.join(missing)}")
    if plan.nodes.count > 1:
        raise UserError("--device-batch auto tries one machine; give all of them the same number")
    memory = min(visible_memory()[: plan.nproc], default=0)
    if not memory:
        raise UserError("--device-batch auto: nvidia-smi does not report the memory; give a number")
    return micro_batches(plan.hyperparameters, plan.nproc), memory


def _search(plan, candidates, memory, names, stream):
    """The largest candidate that fits and its peak memory in MiB; UserError if nothing fits."""
    peaks, limit = {}, MARGIN * memory

    def fits(micro_batch):
        print(f"trying micro_batch_size {micro_batch}", end=": ", file=stream, flush=True)
        outcome = "no answer"
        try:
            peak = peaks[micro_batch] = _peak_memory(plan, micro_batch)
            outcome = "out of memory" if peak == math.inf else f"{peak / 1024:.1f} GiB"
            if limit < peak < math.inf:
                outcome += ", too much"
            return peak <= limit
        finally:
            print(outcome, file=stream, flush=True)

    fitting = bisect_left(candidates, True, key=lambda n: not fits(n))  # what is larger fits less
    if not fitting:
        lengths = {name: plan.hyperparameters[name] for name in length_names(plan.hyperparameters)}
        shorter = " ".join(f"--set {name}={length // 2}" for name, length in lengths.items())
        raise UserError(
            f"not even one sequence of {max(lengths.values())} tokens fits into {MARGIN:.0%} of the"
            f" {memory / 1024:.1f} GiB of {names}; try {shorter} or a smaller model_dim")
    best = candidates[fitting - 1]
    return best, peaks[best]


def _peak_memory(plan, micro_batch):
    """Runs a trial and returns its peak in MiB, infinity if there was not enough."""
    with tempfile.TemporaryDirectory(prefix="device_batch_") as folder:
        trial = replace(plan, options=trial_options(plan, micro_batch), out=Path(folder))
        failure = execute(trial, io.StringIO())
        if failure is None:
            peak = read_log(trial.out / "log.txt").peak_memory_mib
            if peak is None:
                raise UserError("a trial ended without a line peak_memory; does torch see the GPU?")
            return peak
        stderr = "".join(file.read_text("utf-8", "replace")
                         for file in trial.out.glob("stderr_rank*.txt"))
    if failure.stopped or not OUT_OF_MEMORY.search(stderr):
        raise UserError(failure.text, failure.exit_code)
    return math.inf


def _key(plan, candidates, memory):
    """A hash of everything that the answer depends on."""
    without = load_glossary().of_kind(*TAKE_NO_MEMORY)
    options = {name: str(value) for name, value in trial_options(plan, candidates[-1]).items()
               if name not in without}
    facts = [plan.script.path.read_text(encoding="utf-8"), options, candidates,
             plan.gpus[: plan.nproc], memory, MARGIN, importlib.metadata.version("torch")]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# ---- predictions ----


@dataclass(frozen=True)
class Fitting:
    """A micro batch that is predicted to fit: its sequences, {hyperparameter: tokens of a sequence}
    of training and then of validation, and bytes at their peak."""

    sequences: int
    lengths: dict[str, int]
    peak: float

    def __str__(self):
        """Sequences x tokens; of training / of validation where those differ."""
        return f"{self.sequences} x " + " / ".join(f"{n:,}" for n in self.lengths.values())

    def shortened(self, own: dict[str, object]) -> str:
        """The options that bring sequences to these lengths, a space before each."""
        return "".join(f" --set {name}={length}" for name, length in self.lengths.items()
                       if length < own[name])


def find_prediction(script: Script, options: dict[str, object]) -> StoredPrediction | None:
    """The prediction of a milestone's code of today with these hyperparameters in place of its own;
    None if there is none, or if one of them changes the memory."""
    try:
        found = script.milestone and load_predictions().get(script.milestone.slug)
    except (OSError, ValueError):  # make_figures.py reports it
        return None
    if not found:
        return None
    changed = {name for name, value in options.items()
               if script.typed(name, value) != script.hyperparameters[name]}
    fits = changed <= {*load_glossary().of_kind(*MAY_DIFFER)}
    return found if fits and found.code == code_hash(script.path) else None


def largest_predicted(prediction: StoredPrediction, hyperparameters: dict[str, object],
                      world_size: int, room: float) -> Fitting | None:
    """The largest micro batch that divides the batch among the ranks and is predicted to take no
    more than `room` bytes.

    Where not even one sequence fits, those that are too long are halved until it does: sequences of
    training, and of validation where they have a length of their own. None if nothing fits.
    """
    train, val = length_names(hyperparameters)
    lengths = {name: hyperparameters[name] for name in (train, val)}
    while all(lengths.values()):
        peaks = {n: prediction.alone(n * lengths[train], n * lengths[val])
                 for n in micro_batches({**hyperparameters, **lengths}, world_size)}
        fitting = [n for n, peak in peaks.items() if peak <= room]
        if fitting:
            return Fitting(fitting[-1], lengths, peaks[fitting[-1]])
        lengths[train if prediction.alone(lengths[train]) > room else val] //= 2
    return None
