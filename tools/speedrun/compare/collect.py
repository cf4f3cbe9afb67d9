"""Turns the targets of a comparison into entries: trains scripts in turn, and reads logs."""

import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from speedrun.base.errors import Stopped, UserError
from speedrun.base.text import short
from speedrun.compare.results import Comparison, Entry, choose_target, run_from_log
from speedrun.history.manifest import load_manifest
from speedrun.run.data import fingerprint
from speedrun.run.execute import run
from speedrun.run.gpus import peak_flops
from speedrun.run.log import RULE, SCRIPT, read_log
from speedrun.run.plan import Plan, make_plan
from speedrun.run.summary import corpus_of
from speedrun.scripts.find import code_hash

WITH_SETTINGS = re.compile(r"(?P<script>.+?):(?P<settings>\w+=.*)")
# What the runs of one entry may differ in.
NOT_COMPARED = ("seed", "log_dir")


@dataclass(frozen=True)
class Target:
    """One target as it was typed: a script to train, with settings of its own, or a log to read."""

    text: str
    script: str | None = None
    settings: tuple[str, ...] = ()
    log: Path | None = None


@dataclass
class Collected:
    """Entries in the order of their targets; the first plan, and what ended the runs early."""

    entries: list[Entry]
    plan: Plan | None = None
    stopped: Stopped | None = None


def parse_target(text: str) -> Target:
    """The Target in `text`: a log.txt or the folder of a run, else a milestone, train or script,
    possibly with hyperparameters of its own (`02:muon_lr=1e-3,adam_lr=2e-3`).

    Raises UserError for the path of a log that is not there.
    """
    path = Path(text)
    if (path / "log.txt").is_file():
        return Target(text, log=path / "log.txt")
    if path.is_file() and path.suffix != ".py":
        return Target(text, log=path)
    if path.suffix in (".txt", ".log"):
        raise UserError(f"{text}: there is no such log")
    match = WITH_SETTINGS.fullmatch(text)
    if match is None:
        return Target(text, script=text)
    return Target(text, script=match["script"], settings=tuple(match["settings"].split(",")))


def collect(
    texts: Sequence[str], seeds: Sequence[int], out: Path, stream, *, target: float | None = None,
    settings: Sequence[str] = (), command: str = "", **options,
) -> tuple[Comparison, Stopped | None]:
    """Trains or reads the targets called `texts`, and says what stopped that early, or None.

    seeds: of the runs of each script; out: the folder that will hold them; stream: a text stream
    for a line per run; target: the loss to reach, nats per token (None: see choose_target);
    settings: "name=value" for all scripts; options: those of make_plan. Raises UserError or
    ManifestError, in one line, before anything runs.
    """
    targets = [parse_target(text) for text in texts]

    def plan_of(number, seed):
        name = re.sub(r"[^0-9A-Za-z.=_-]+", "_", targets[number].text)
        own = [*settings, *targets[number].settings, f"seed={seed}"]
        folder = out / f"{number}-{name}-seed{seed}"
        return make_plan(targets[number].script, settings=own, out=folder, **options)

    collected = gather(targets, plan_of, seeds, stream)
    reason = "as asked"
    if target is None:
        target, reason = choose_target(collected.entries)
    corpora = {corpus_of(target.log.parent) for target in targets if target.log}
    if collected.plan:
        corpora.add(fingerprint(collected.plan.data) if collected.plan.data else None)
    corpus = corpora.pop() if len(corpora) == 1 else None  # else they are not to be compared
    return Comparison(collected.entries, target, reason, command, corpus), collected.stopped


def gather(
    targets: Sequence[Target], plan_of: Callable[[int, int], Plan], seeds: Sequence[int], stream
) -> Collected:
    """The entries of the targets: logs are read, then scripts trained, once per seed.

    Scripts take turns, A B A B, so that a slow hour harms all alike. plan_of makes the Plan of a
    target's number and a seed; it is called for all of them first. stream: a text stream for a
    line per run. A run that fails becomes a failure of its entry; a signal ends all of them, and
    what has finished is kept. Raises UserError for a file that is no log, and what plan_of raises.
    """
    entries = _read_logs(targets)  # by the target's number
    scripts = [number for number, target in enumerate(targets) if not target.log]
    turns = [(number, seed, plan_of(number, seed)) for seed in seeds for number in scripts]
    for number, _, plan in turns[: len(scripts)]:
        entries[number] = _entry_of(plan, targets[number])
    in_order = {id(entries[number]): entries[number] for number in range(len(targets))}
    collected = Collected(list(in_order.values()), turns[0][2] if turns else None)
    for turn, (number, seed, plan) in enumerate(turns, start=1):
        head = f"[{turn}/{len(turns)}] {entries[number].label}, seed {seed}:"
        print(head, short(plan.out), file=stream, flush=True)
        try:
            run(plan, sys.stderr if sys.stderr.isatty() else io.StringIO())
        except Stopped as error:
            collected.stopped = error
            break
        except UserError as error:
            entries[number].failures.append(f"seed {seed}: {error}")
            print(head, "failed:", error, file=stream, flush=True)
        else:
            log = plan.out / "log.txt"
            _add_run(entries[number], log, read_log(log))
            loss = entries[number].final_losses[-1:]
            print(head, *(f"val_loss {x:.4f}" for x in loss), file=stream, flush=True)
    return collected


def _entry_of(plan, target):
    milestone = plan.script.milestone
    label = milestone.name if milestone else plan.script.name
    own = [setting.removeprefix("--") for setting in target.settings]
    return Entry(
        label=" ".join([label, *own]),
        milestone=milestone.id if milestone else None,
        code=code_hash(plan.script.path),
        options={k: v for k, v in plan.options.items() if k not in NOT_COMPARED},
    )


def _read_logs(targets):
    """The entries of the logs among the targets, by the target's number. Logs of one script with
    one set of hyperparameters but the seed are runs of one entry."""
    entries, alike = {}, {}
    for number, target in enumerate(targets):
        if not target.log:
            continue
        try:
            log = read_log(target.log)
        except OSError as error:
            raise UserError(f"{target.log}: {error.strerror}") from None
        except ValueError as error:
            raise UserError(str(error)) from None
        if not log.steps:
            raise UserError(f"{target.log} ends before its first step line")
        key = _same(target.log, log)
        if key not in alike:
            alike[key] = _entry_of_log(target.log, log)
        entries[number] = alike[key]
        _add_run(entries[number], target.log, log)
    labels = [entry.label for entry in alike.values()]
    for entry in alike.values():
        if labels.count(entry.label) > 1:  # one script with several sets of hyperparameters
            entry.label += f" ({_folder(Path(entry.runs[0].log))})"
    return entries


def _entry_of_log(path, log):
    """The entry of a log; a milestone is known by the code beside its log."""
    script, manifest = path.parent / SCRIPT, load_manifest()
    code = code_hash(script) if script.is_file() else None
    mine = [m for m in manifest.written() if code and code_hash(m.script) == code]
    options = {k: v for k, v in log.hyperparameters.items() if k not in NOT_COMPARED}
    label = mine[0].name if mine else _folder(path)
    return Entry(label, milestone=mine[0].id if mine else None, code=code, options=options)


def _folder(path):
    """A log's own name, or that of its folder where all logs are called log.txt."""
    return path.resolve().parent.name if path.name == "log.txt" else path.stem


def _same(path, log):
    """A key that is equal for runs of one entry."""
    text = path.read_text(encoding="utf-8", errors="replace")
    script = text.partition(f"{RULE}\n")[0] if RULE in text else ""
    compared = {k: v for k, v in log.hyperparameters.items() if k not in NOT_COMPARED}
    if not script or not compared:
        return str(path.resolve())  # a public log does not tell what it shares with another
    return hashlib.sha256((script + json.dumps(compared, sort_keys=True)).encode()).hexdigest()


def _add_run(entry, path, log):
    entry.runs.append(run_from_log(Path(short(path)), log))
    entry.vocab_size = log.hyperparameters.get("vocab_size")
    entry.tokens_per_step = log.hyperparameters.get("total_batch_size")
    entry.world_size = int(log.environment.get("world_size", 1))
    entry.device = log.environment.get("device")


def add_mfu(entries: Sequence[Entry], measure: bool) -> None:
    """Fills in flops_per_token and peak_flops of the entries, where both can be known.

    measure: take the speed of a large matrix product on this machine for a device of this machine
    whose data sheet is not known.
    """
    from speedrun.scripts.flops import measured_peak, training_flops_per_token  # torch: seconds

    for entry in entries:
        entry.peak_flops = peak_flops(entry.device) if entry.device else None
    if measure:
        device, flops = measured_peak()
        for entry in entries:
            if entry.device == device:
                entry.peak_flops = entry.peak_flops or flops
    for entry in entries:
        if entry.peak_flops and entry.runs:
            log = Path(entry.runs[0].log)
            hyperparameters = read_log(log).hyperparameters
            script = log.parent / SCRIPT
            if script.is_file() and hyperparameters:
                entry.flops_per_token = training_flops_per_token(script, hyperparameters)
