"""Examinations by speedrun.check for the tests of a file, in a fork of the warm server.

conftest.py has the fixture, `ask`.
"""

import multiprocessing
import re
import tempfile
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from unittest import mock

import numpy as np

from ranks import warm_context
from speedrun.history.manifest import load_manifest

MANIFEST = load_manifest()
IDS = [milestone.id for milestone in MANIFEST.milestones]
ROOT = IDS[0]


def source_of(id):
    """The text of a milestone's snapshot."""
    return MANIFEST.get(id).script.read_text(encoding="utf-8")


def edited(id, *edits):
    """A snapshot's text with each (old, new) replaced, wherever it stands; old must occur."""
    text = source_of(id)
    for old, new in edits:
        assert old in text, f"{id}: no {old!r}"
        text = text.replace(old, new)
    return text


# Kinds of what is the same on every machine, but for what depends on memory, threads and chance.
EXACT = ("fact", "same", "in common", "as precise", "at most", "at least")
DEPENDS = re.compile("^batches|^bytes (that are read|of memory)|uneven|once$")


def lines_of(seen):
    """A line for each observation of a job: what it is of, its kind, how closely scripts are held
    to it, and its value, without numbers where other machines give others; of an error that it is
    one: its words depend on whether Triton is here."""
    lines = []
    for what, (kind, *rest) in seen.items():
        value, within = rest if len(rest) == 2 else (rest, 0.0)
        if kind == "log":  # without versions and names of fields
            value = [line for line in value if not line.startswith(("environment", "hyperpar"))]
        within = "" if isinstance(within, dict) else f"{np.atleast_1d(within).round(9).tolist()}"
        shown = "" if kind == "error" else value if (
            kind in EXACT and not DEPENDS.search(what)) else _brief(value)
        lines.append(f"{what} | {kind} | {within} | {shown}\n")
    return "".join(lines)


def _brief(value):
    import torch

    if isinstance(value, dict):
        return ", ".join(f"{name} {_brief(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_brief, value))
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return re.sub(r"(?<![a-z])-?\d[\d.e+-]*|nan|inf", "n", str(value))


def serve(folder, requests):
    """Answers requests, dictionaries from a connection, until there are no more."""
    from speedrun.check import trace
    from speedrun.check.examine import Examination, examine, in_words
    from speedrun.check.syntax import check_syntax

    known = {}

    def examination(id, jobs):
        """The one of a milestone that looks at these jobs, or all; what others showed is there."""
        if id not in known:
            known[id] = Examination(Path(folder), time.monotonic() + 7200, MANIFEST.get(id)), {}
        made, shown = known[id]
        every = trace.GENERATION if "max_new_tokens" in made.values else trace.JOBS
        made.jobs = [job for job in every if not jobs or job in ("contract", "updates", *jobs)]
        if missing := [job for job in made.jobs if job not in shown]:
            wanted, made.jobs = made.jobs, missing
            vars(made).pop("wanted", None)
            limits = made.limits
            with mock.patch("speedrun.check.kept.save") if jobs or shown else nullcontext():
                shown |= made.wanted  # what is kept has all jobs
            made.jobs, made.wanted, made.limits = wanted, shown, limits | made.limits
        return made

    with suppress(EOFError):
        while request := requests.recv():
            here = examination(request["id"], tuple(request.get("jobs", ())))
            if "text" in request:
                source = request["text"].encode()
                answer = [check_syntax(source)]
                if answer[0].passed:
                    answer += examine(source, here)
            elif "texts" in request:
                found = here.first_differences(request["texts"], request.get("jobs", here.jobs))
                answer = [seen and [seen[1], *in_words(seen[0])] for seen in found]
            elif "lines" in request:
                answer = {job: lines_of(here.wanted[job]) for job in here.jobs}
            else:
                answer = [job for job, seen in here.wanted.items()
                          if seen.get(trace.ALL[job].what, [""])[0] == "error"]
                answer += [what for seen in here.wanted.values()
                           for what, (kind, *some) in seen.items()
                           if kind == "unexercised" and some[0]]
            requests.send(answer)


@contextmanager
def examinations():
    """ask(id=..., text=...): the outcomes of a script; with texts=[...]: for each the first thing
    in which it differs from the milestone, or None (jobs=[...]: in these jobs); with id alone: the
    jobs in which the milestone's own script stops, so that nothing is compared in them, and the
    properties that no run exercises."""
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        server = warm_context().Process(target=serve, args=(folder, theirs))
        server.start()
        theirs.close()

        def request(**what):
            ours.send(what)
            return ours.recv()

        try:
            yield request
        finally:
            ours.close()
            server.join(30)


def failures(outcomes):
    """{block or look: all that is said of it} of what did not pass."""
    return {o.key: f"{o.name} | {o.expected} | {o.got} | {o.meaning}" for o in outcomes
            if not o.passed}
