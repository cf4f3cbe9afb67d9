"""Carries out a plan: prepares its folder, launches it, tidies up, sums up."""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from signal import SIGINT
from typing import TextIO

from speedrun.base.errors import Stopped, UserError
from speedrun.base.files import replace_file
from speedrun.base.text import short
from speedrun.run import conversations
from speedrun.run.checkpoint import CHECKPOINT, PARTIAL, check_start, sign
from speedrun.run.data import BUILTIN, make_builtin
from speedrun.run.failure import Failure, explain, rank_stderr
from speedrun.run.log import RULE, SCRIPT, read_log
from speedrun.run.plan import Plan, check_out, make_fresh_out
from speedrun.run.preflight import check_shards
from speedrun.run.progress import NotFinite, follow
from speedrun.run.summary import Summary, summarize, to_json
from speedrun.run.torchrun import announce_nodes, check_open_files, run_ranks, stop_signals

PROBE_BYTES = 2**16  # to find out whether a disk is full


def run(plan: Plan, stream: TextIO) -> Summary | None:
    """Runs the plan and shows it on a text stream.

    The folder of the run, plan.out or the next free name if nobody chose that one, then holds
    log.txt, train_gpt.py, summary.json and, of each rank that wrote to stderr,
    stderr_rank<N>.txt. Returns the summary; None on a node other than 0, where there is no log.
    Raises UserError if the run cannot start or fails, Stopped if a signal to this process ends it;
    a log is kept if it has steps, or if the error does not say what was wrong.
    """
    check_open_files()
    announce_nodes(plan.nodes, stream)
    out_is_new = plan.out_is_free or not plan.out.exists()
    with _writing_in(plan.out):
        if plan.out_is_free:
            plan = replace(plan, out=make_fresh_out(plan.script.name))
        plan.out.mkdir(parents=True, exist_ok=True)
    log = plan.out / "log.txt"
    try:
        data = []
        failure = execute(plan, stream, data.append)
        if failure is None:
            return _sum_up(plan, data[0], stream)
        kept, stderr = [], plan.out / f"stderr_rank{failure.rank}.txt"
        is_riddle = not (failure.explained or failure.stopped) and (log.exists() or stderr.exists())
        if not (is_riddle or _has_steps(log)):
            _discard(plan)
        elif log.exists():
            kept.append(f"the log so far: {short(log)}")
        if stderr.exists() and not failure.explained:
            kept.append(f"stderr: {short(stderr)}")
        error = Stopped if failure.stopped else UserError
        raise error("\n".join(filter(None, [failure.text, "; ".join(kept)])), failure.exit_code)
    finally:
        if out_is_new and plan.out.exists() and not any(plan.out.iterdir()):
            plan.out.rmdir()


def execute(
    plan: Plan, stream: TextIO, note_data: Callable[[str | None], object] = lambda fingerprint: None
) -> Failure | None:
    """Runs the plan, shows it on a text stream and leaves all but the summary in plan.out.

    note_data: gets the data's fingerprint before the run. Returns None, or why the run failed or
    was stopped. Raises UserError if it cannot start.
    """
    values = plan.hyperparameters
    if plan.data == BUILTIN:
        conversations.make_builtin() if "train_file" in values else make_builtin()
    check_shards(values, tokens=True)
    check_start(values, plan.script.milestone or plan.script.tiny_of)
    note_data(plan.fingerprint)
    with stop_signals() as stop, _claimed(plan):
        try:
            with follow(plan, stream, stop.give_up) as show:
                exit_code = run_ranks(plan.command, plan.ranks_dir, show, stop)
        except NotFinite as error:
            return Failure(str(error), 1, explained=True)
        if stop.reason:
            return Failure(stop.reason, 1, explained=True)
        if stop.signum:
            text = "interrupted" if stop.signum == SIGINT else f"stopped by {stop.signum.name}"
            return Failure(text, 128 + stop.signum, stopped=True)
        if exit_code and not plan.ranks_dir.is_dir():
            return Failure(f"{short(plan.out)} was moved or removed during the run", 1,
                           explained=True)
        if exit_code:
            return _blame_disk(plan.out, explain(plan.ranks_dir, exit_code))
        return None


@contextmanager
def _claimed(plan):
    """Inside the block, the run's folder is this run's only and holds a copy of the script; a
    refusal leaves the folder as it is, and an error that no log explains leaves nothing."""
    check_out(plan.out, plan.nodes)  # another run may have begun since the plan was made
    with _writing_in(plan.out):
        try:
            plan.ranks_dir.mkdir(parents=True)  # of several runs at once, one can
        except FileExistsError:
            check_out(plan.out, plan.nodes)
            raise
    try:
        if plan.nodes.rank == 0:
            with _writing_in(plan.out):
                shutil.copyfile(plan.script.path, plan.out / SCRIPT)
        yield
    except BaseException:
        _tidy(plan)
        if not (plan.out / "log.txt").exists():
            _discard(plan)
        raise
    _tidy(plan)


@contextmanager
def _writing_in(out):
    """An OSError inside the block becomes a UserError, one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write in {short(out)}: {error.strerror}") from None


def _blame_disk(out, failure):
    """The failure, or that the folder can no longer be written: the ranks' messages may be lost
    then, and torch.save does not give the reason."""
    try:
        with tempfile.NamedTemporaryFile(dir=out) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
        return failure
    except OSError as error:
        # the launcher's failure is only a consequence of the lost messages
        more = "" if failure.text.startswith("the launcher") else f" ({failure.text})"
        text = f"cannot write in {short(out)}: {error.strerror}{more}"
        return replace(failure, text=text, explained=False)


def _tidy(plan):
    """Keeps the ranks' stderr, and no other file of the launcher's."""
    with _writing_in(plan.out):
        for local_rank, file in rank_stderr(plan.ranks_dir).items():
            if file.stat().st_size:
                rank = plan.nodes.rank * plan.nproc + local_rank
                file.replace(plan.out / f"stderr_rank{rank}.txt")
        shutil.rmtree(plan.ranks_dir, ignore_errors=True)
        (plan.out / PARTIAL).unlink(missing_ok=True)  # it was cut short


def _has_steps(log):
    """Whether a run logged a step."""
    try:
        return read_log(log).last is not None
    except (OSError, ValueError):  # missing or not whole
        return False


def _discard(plan):
    """Undoes a run that logged no step, so that the folder can be used again; other nodes' files
    stay."""
    out, first = plan.out, plan.nodes.rank * plan.nproc
    files = [out / f"stderr_rank{rank}.txt" for rank in range(first, first + plan.nproc)]
    for file in files if plan.nodes.rank else (out / SCRIPT, out / "log.txt", *files):
        file.unlink(missing_ok=True)


def _sum_up(plan, data, stream):
    """The summary of a whole run; data: the fingerprint of what it was to read."""
    if plan.nodes.rank > 0:
        return None
    file, checkpoint = plan.out / "log.txt", plan.out / CHECKPOINT
    try:
        log = read_log(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the script ended, and {short(file)} cannot be read: {reason}; either it"
                        " wrote no log, or the folder was changed meanwhile") from None
    if log.last is None:
        raise UserError(f"no step was logged in {short(file)}")
    step, length = log.last.step, log.last.train_steps
    if length and step < length:
        raise UserError(f"the script ended after step {step} of {length}; the log so far:"
                        f" {short(file)}")
    changed = [*_changed_data(plan, data)]
    data = None if changed else data
    changed += _keep_what_ran(file)
    try:
        if checkpoint.exists():
            sign(checkpoint, plan.out / SCRIPT)
    except OSError as error:
        print(f"note: {short(checkpoint)} does not name its script: {error.strerror}", file=stream)
    summary = summarize(plan, log, data, "; ".join(changed))
    try:
        replace_file(plan.out / "summary.json", (to_json(summary) + "\n").encode())
    except UserError as error:
        raise UserError(f"{error}; the run is complete, its log: {short(file)}") from None
    return summary


def _keep_what_ran(log):
    """Makes the script beside a log the one with which the log begins, if that is another, as after
    an edit while the run started; yields what changed, in words."""
    ran, rule, _ = log.read_text(encoding="utf-8", errors="replace").partition(f"{RULE}\n")
    copy = log.with_name(SCRIPT)
    if rule and "class Hyperparameters" in ran and copy.is_file() and (
            ran.strip() != copy.read_text(encoding="utf-8", errors="replace").strip()):
        replace_file(copy, ran.encode())
        yield "the script, while the run started (the copy is what ran)"


def _changed_data(plan, before):
    """Yields what changed, in words, if the data are not those that the run was to read."""
    try:
        now = plan.fingerprint
    except OSError as error:
        now = error.strerror
    if now != before:
        yield f"the data, during the run (fingerprint {before} before, {now} after)"
