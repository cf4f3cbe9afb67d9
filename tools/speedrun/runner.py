"""Carries out a plan: prepares its folder, launches it, tidies up, sums up."""

import importlib.util
import shutil
from pathlib import Path
from signal import SIGINT
from typing import TextIO

from speedrun.dataset import BUILTIN, make_builtin, short
from speedrun.failure import Failure, explain, rank_stderr
from speedrun.launch import RunError, Stopped, launch
from speedrun.plan import Plan
from speedrun.progress import follow
from speedrun.runlog import read_log
from speedrun.summary import Summary, summarize, to_json


def run(plan: Plan, stream: TextIO) -> Summary | None:
    """Runs the plan and shows it on a text stream.

    The folder plan.out then holds log.txt, train_gpt.py, summary.json and, of each rank that wrote
    to stderr, stderr_rank<N>.txt. Returns the summary; None on a node other than 0, where there is
    no log. Raises RunError if the run cannot start or fails, Stopped if a signal to this process
    ends it; what it logged is kept.
    """
    out_is_new = not plan.out.exists()
    failure = execute(plan, stream)
    if failure is None:
        return _sum_up(plan)
    log = plan.out / "log.txt"
    if not log.exists() and (failure.spoken or failure.stopped):
        _discard(plan.out, out_is_new)  # the error line says all that there is to know
    so_far = f"\nthe log so far: {short(log)}" if log.exists() else ""
    error = Stopped if failure.stopped else RunError
    raise error(failure.text + so_far, failure.exit_code)


def execute(plan: Plan, stream: TextIO) -> Failure | None:
    """Runs the plan, shows it on a text stream and leaves all but the summary in plan.out.

    Returns None, or why the run failed or was stopped. Raises RunError if it cannot start.
    """
    if importlib.util.find_spec("torch") is None:
        raise RunError("torch is not installed here: pip install -r requirements.txt")
    if plan.data == BUILTIN:
        make_builtin()
    _prepare(plan)
    report = plan.ranks_dir / "launcher.txt"
    try:
        with follow(plan, stream) as show:
            ended = launch(plan.command, report, show)
        if ended.stopped_by:
            signum = ended.stopped_by
            word = "interrupted" if signum == SIGINT else f"stopped by {signum.name}"
            return Failure(word, 128 + signum, stopped=True)
        if ended.exit_code:
            text = report.read_text(encoding="utf-8", errors="replace")
            return explain(text, rank_stderr(plan.ranks_dir), ended.exit_code)
        return None
    finally:
        _tidy(plan)


def _prepare(plan):
    """Makes the run's folder and copies the script."""
    try:
        plan.ranks_dir.mkdir(parents=True)
        if plan.nodes.rank == 0:
            shutil.copyfile(plan.script.path, plan.out / "train_gpt.py")
    except OSError as error:
        raise RunError(f"cannot write in {plan.out}: {error.strerror}") from None


def _tidy(plan):
    """Keeps what the ranks wrote to stderr, and nothing else of the launcher's files."""
    for local_rank, file in rank_stderr(plan.ranks_dir).items():
        if file.stat().st_size:
            rank = plan.nodes.rank * plan.nproc + local_rank
            file.replace(plan.out / f"stderr_rank{rank}.txt")
    shutil.rmtree(plan.ranks_dir, ignore_errors=True)


def _discard(out: Path, out_is_new):
    """Undoes a run that never came to its log, so that the folder can be used again."""
    for file in (out / "train_gpt.py", *out.glob("stderr_rank*.txt")):
        file.unlink(missing_ok=True)
    if out_is_new and not any(out.iterdir()):
        out.rmdir()


def _sum_up(plan):
    if plan.nodes.rank > 0:
        return None
    try:
        log = read_log(plan.out / "log.txt")
    except (OSError, ValueError) as error:
        raise RunError(f"the script ended without a log: {error}") from None
    if log.last is None:
        raise RunError(f"no step was logged in {short(plan.out / 'log.txt')}")
    summary = summarize(plan, log)
    (plan.out / "summary.json").write_text(to_json(summary) + "\n", encoding="utf-8")
    return summary
