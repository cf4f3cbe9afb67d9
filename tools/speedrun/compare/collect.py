"""Turns the targets of a comparison into entries: trains scripts in turn, and reads logs."""

import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from speedrun.base.errors import Stopped, UserError
from speedrun.base.text import short, visible
from speedrun.compare.results import Comparison, Entry, choose_target, run_from_log
from speedrun.history.glossary import load_glossary
from speedrun.history.manifest import load_manifest
from speedrun.history.tokens import batch_settings
from speedrun.run.execute import run
from speedrun.run.gpus import peak_flops
from speedrun.run.log import RULE, SCRIPT, read_log
from speedrun.run.plan import fresh_out, make_fresh_out, make_plan
from speedrun.run.summary import corpus_of, milestone_of
from speedrun.scripts.find import code_hash, find_script

SCRIPT_AND_SETTINGS = re.compile(r"(.*?)(?::(\w+(?:=.*)?))?", re.DOTALL)


@dataclass(frozen=True)
class Target:
    """One target as it was typed: a log to read, or a script to train with settings of its own."""

    text: str
    log: Path | None = None
    script: str | None = None
    settings: tuple[str, ...] = ()


def parse_target(text: str) -> Target:
    """The Target in `text`: a log.txt or the folder of a run, else a milestone, train or script,
    possibly with hyperparameters of its own (`02:muon_lr=1e-3,adam_lr=2e-3`).

    Raises UserError for the path of a log that is not there and for a name without a value.
    """
    path = Path(text)
    path = path / "log.txt" if (path / "log.txt").exists() else path
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would wait for its writer
        raise UserError(f"{path} is not a regular file, so it is not a log; name another")
    if any(path.glob("*/log.txt")):
        raise UserError(f"{text} is a folder of runs; name each of them, as in {path / '*'}")
    if path.is_file() and path.suffix != ".py":
        return Target(text, log=path)
    if (path / "summary.json").exists() or any(path.glob("ranks*")):
        raise UserError(f"{text} is a run whose log.txt is missing; to train it again, name"
                        f" {path / SCRIPT}")
    if path.suffix in (".txt", ".log"):
        raise UserError(f"{text}: there is no such log")
    script, settings = SCRIPT_AND_SETTINGS.fullmatch(text).groups()
    settings = tuple(settings.split(",")) if settings else ()
    for name in (setting for setting in settings if "=" not in setting):
        raise UserError(f"{text}: give {name} a value, as in {script}:{name}=0.01", 2)
    names = [setting.partition("=")[0] for setting in settings]
    for name in (name for name in names if names.count(name) > 1):
        raise UserError(f"{text}: {name} has two values", 2)
    return Target(text, script=script, settings=settings)


def seeded(settings: Sequence[str], seed: int) -> list[str]:
    """The settings and the seed; UserError where they choose another."""
    for setting in settings:
        if setting.removeprefix("--").partition("=")[0] == "seed":
            raise UserError(f"--set {setting}: the seed is chosen with --seed", 2)
    return [*settings, f"seed={seed}"]


def leave_one_out(text: str, **options) -> tuple[list[str], list[str]]:
    """The targets that ablate the milestone called `text`: itself, then once without each gain that
    it or an ancestor declares (`ablate`); and, apart, the settings that a run here has anyway.

    options: those of make_plan. Raises as make_plan, and UserError if there is nothing to ablate.
    """
    milestone = load_manifest().get(text)
    declared = [m.ablate for m in reversed(load_manifest().lineage(milestone)) if m.ablate]
    if not declared:
        raise UserError(f"{milestone.name} declares no gain that a flag takes out", 2)
    plan = make_plan(text, out=fresh_out("compare"), **options)
    here = {} if plan.gpus else load_glossary().column("cpu")  # where a default follows the machine
    here |= {k: v for k, v in plan.hyperparameters.items() if v is not None}
    if plan.nproc * plan.nodes.count == 1:
        needs = load_glossary().column("needs")
        here |= {name: False for name in needs if needs[name] == "ranks"}
    anyway = [off for off in declared if off == f"{(name := off.partition('=')[0])}={here[name]}"]
    return [text, *(f"{text}:{off}" for off in declared if off not in anyway)], anyway


def collect(
    texts: Sequence[str], seeds: Sequence[int], out: Path | str, stream: TextIO, *,
    target: float | None = None, settings: Sequence[str] = (), command: str = "", **options,
) -> tuple[Comparison, Stopped | None]:
    """Reads the logs among the targets called `texts`, then trains the scripts, once per seed.

    Scripts take turns, A B A B, so that a slow hour harms all alike. A run that fails becomes a
    failure of its entry; a signal ends all of them: it is returned beside what had finished.

    out: the folder that will hold the runs, or a name for a fresh one below runs/; stream: gets a
    line per run; target: the loss to reach, nats per token (None: see choose_target); settings:
    "name=value" for all scripts; options: those of make_plan. Raises UserError or ManifestError, in
    one line, before anything runs.
    """
    targets = [parse_target(text) for text in texts]
    entries, plans = _read_logs(targets), {}
    folder = fresh_out(out) if isinstance(out, str) else out
    for seed in seeds:
        for number, one in enumerate(targets):
            if not one.log:
                name = ":".join([find_script(one.script).name, *one.settings])
                name = re.sub(r"[^0-9A-Za-z.=_-]+", "_", name)
                plans[number, seed] = make_plan(
                    one.script, settings=seeded([*settings, *one.settings], seed),
                    out=folder / f"{number}-{name}-seed{seed}", **options)
    if isinstance(out, str) and plans:
        folder = make_fresh_out(out)
        plans = {key: replace(plan, out=folder / plan.out.name) for key, plan in plans.items()}
    for (number, _), plan in plans.items():
        entries.setdefault(number, _entry_of_plan(plan, targets[number]))
    stopped = _train(plans, entries, stream)

    in_order = list(dict.fromkeys(entries[number] for number in range(len(targets))))
    reason = "as asked"
    if target is None:
        target, reason = choose_target(in_order)
    corpora = {corpus_of(one.log.parent) for one in targets if one.log}
    corpora |= {plan.fingerprint for plan in list(plans.values())[:1]}
    mixed = len(corpora) > 1
    corpus = None if mixed else corpora.pop()
    return Comparison(in_order, target, reason, command, corpus, mixed), stopped


def _train(plans, entries, stream):
    """Makes the runs, {(target's number, seed): Plan}, and returns what stopped that early."""
    for turn, ((number, seed), plan) in enumerate(plans.items(), start=1):
        entry, log = entries[number], plan.out / "log.txt"
        head = visible(f"[{turn}/{len(plans)}] {entry.label}, seed {seed}:")
        print(head, visible(short(plan.out)), file=stream, flush=True)
        try:
            run(plan, sys.stderr if sys.stderr.isatty() else io.StringIO())
        except Stopped as error:
            return error
        except UserError as error:
            entry.failures.append(f"seed {seed}: {error}")
            print(head, "failed:", visible(str(error)), file=stream, flush=True)
        else:
            _add_run(entry, log, read_log(log))
            loss = entry.final_losses[-1:]
            print(head, *(f"val_loss {x:.4f}" for x in loss), file=stream, flush=True)
    return None


def _entry_of_plan(plan, target):
    milestone = plan.script.milestone
    label = " ".join([milestone.name if milestone else plan.script.name, *target.settings])
    return Entry(label, milestone=milestone and milestone.slug,
                 code=code_hash(plan.script.path), options=_compared(plan.options))


def _read_logs(targets):
    """The entries of the logs among the targets, by the target's number. Logs of one script with
    one set of hyperparameters but the seed are runs of one entry, unfinished ones each of its
    own."""
    entries, alike, read = {}, {}, set()
    for number, target in enumerate(targets):
        if not target.log:
            continue
        if target.log.resolve() in read:
            raise UserError(f"{target.text}: this log is named twice; a run counts once")
        read.add(target.log.resolve())
        try:
            log = read_log(target.log)
        except ValueError as error:
            raise UserError(str(error)) from None
        if not log.steps:
            raise UserError(f"{target.log} ends before its first step line")
        key = _key(target.log, log)
        try:
            if key not in alike:
                alike[key] = _entry_of_log(target.log, log)
            entries[number] = alike[key]
            _add_run(entries[number], target.log, log)
        except (SyntaxError, TypeError, ValueError) as error:
            raise UserError(f"{target.log}, or the script beside it, is damaged: {error}") from None
    labels = [entry.label for entry in alike.values()]
    for entry in alike.values():
        if labels.count(entry.label) > 1:  # one script with several sets of hyperparameters
            entry.label += f" ({_folder(Path(entry.runs[0].log))})"
    return entries


def _entry_of_log(path, log):
    """The entry of a log; a milestone is known by the code beside its log."""
    script = path.parent / SCRIPT
    code = code_hash(script) if script.is_file() else None
    mine = [m for m in load_manifest().milestones if code and code_hash(m.script) == code]
    slug, label = milestone_of(path.parent), _folder(path)
    if mine:
        label = mine[0].name
    elif slug and slug not in label:
        label += f" ({slug})"
    if missing := _unfinished(log):
        label += f", unfinished: {missing}"
    return Entry(label, milestone=mine[0].slug if mine else None, code=code,
                 options=_compared(log.hyperparameters))


def _folder(path):
    """A log's own name, or that of its folder where all logs are called log.txt."""
    return path.resolve().parent.name if path.name == "log.txt" else path.stem


def _unfinished(log):
    """How far a run came, in words, if its log ends before the last step or the last validation."""
    last, length = log.last.step, log.last.train_steps
    if length and last < length:
        return f"{last} of {length} steps"
    if length and log.val_curve and log.val_curve[-1][0] < length:
        return "no validation after the last step"
    return None


def _key(path, log):
    """What is equal for runs of one entry."""
    if _unfinished(log):
        return path.resolve()
    text = path.read_text(encoding="utf-8", errors="replace")
    script = text.partition(f"{RULE}\n")[0] if RULE in text else ""
    compared = _compared(log.hyperparameters)
    if not script or not compared:
        return path.resolve()  # a public log does not say what it shares with others
    return script, json.dumps(compared, sort_keys=True)


def _compared(hyperparameters):
    """Those in which the runs of one entry are equal."""
    may_differ = load_glossary().of_kind("seed", "output")
    return {k: v for k, v in hyperparameters.items() if k not in may_differ}


def _add_run(entry, path, log):
    entry.runs.append(run_from_log(Path(short(path)), log))
    entry.unread += log.unread
    entry.vocab_size = log.hyperparameters.get("vocab_size")
    entry.tokens_per_step = log.tokens_per_step
    entry.batches = batch_settings(log.hyperparameters)
    entry.world_size = int(log.environment.get("world_size", 1))
    device = log.environment.get("device")
    entry.device = device and str(device)


def add_mfu(entries: Sequence[Entry]) -> None:
    """Fills in flops_per_token and peak_flops of the entries, where both can be known."""
    for entry in entries:
        if not entry.device:  # nor has it a run
            continue
        entry.peak_flops = peak_flops(entry.device)
        log = Path(entry.runs[0].log)
        hyperparameters = read_log(log).hyperparameters
        script = log.parent / SCRIPT
        if entry.peak_flops and script.is_file() and hyperparameters:
            from speedrun.scripts.flops import flops_if_countable  # torch, which takes seconds

            entry.flops_per_token = flops_if_countable(script, hyperparameters)
