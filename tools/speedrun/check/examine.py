"""Examines a script: its trace beside the milestone's, and verdicts on the blocks that differ."""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cached_property
from itertools import combinations
from pathlib import Path

import torch

from speedrun.check import kept, trace
from speedrun.check.differences import Deviation, alike, differences, further_signs
from speedrun.check.hints import applicable_slips
from speedrun.check.screen import Outcome
from speedrun.check.trace_runs import RUN
from speedrun.check.transplant import Mixture, Verdict, judge
from speedrun.check.values import odd_values
from speedrun.check.worker import BROKEN_INPUT, Task, run_tasks, write_shards
from speedrun.history.glossary import load_glossary
from speedrun.history.manifest import Milestone, load_manifest

# A job may compute for LIMIT_S and so many times as long as the milestone's; never is it time by
# the clock, which depends on what else the machine does.
LIMIT_S, SLOWER = 8, 10
SLIPS = 8  # that are tried, those most like the block first: one may say in words what is wrong
PAIRS = 3  # slips of each of two blocks whose pairs are among them
TOGETHER = ("These blocks fit only each other, so they were tried together. Read them side by side:"
            " what one hands on, another must expect. --hint --block NAME helps with each.")
MORE_RANKS = "One rank trains as the milestone does; several do not."
FIRST = ("contract", "schedules", "updates")  # a script that hangs in one of them does in others


class Examination:
    """A milestone, beside which scripts are set, in folders below `folder`. What runs scripts
    raises TimeoutError when they have computed for `budget` seconds, on all cores together."""

    def __init__(self, folder: Path, budget: float, milestone: Milestone):
        self.folder, self.budget, self.values = folder, budget, odd_values(milestone)
        write_shards(folder / "shards")
        self.milestone, self.text = milestone, milestone.script.read_text(encoding="utf-8")
        parent = milestone.parent and load_manifest().get(milestone.parent)
        self.parent = parent.script.read_text(encoding="utf-8") if parent else ""
        self.jobs = trace.GENERATION if "max_new_tokens" in self.values else trace.JOBS
        self.options: dict[str, dict] = {}  # of the jobs
        self.limits: dict[str, float] = {}  # of the jobs, in seconds of computing

    @cached_property
    def wanted(self) -> dict[str, dict]:
        """What the milestone's own script shows in each job."""
        file = kept.file_of(self.milestone.slug, self.text, self.values)
        found = kept.load(file)
        if found:
            if found["run"]:
                self._choose_options(found["seen"]["contract"], found["run"])
        else:
            budget = self.budget
            try:
                found = self._find_wanted()
            except TimeoutError:
                raise TimeoutError("the milestone's own script") from None
            kept.save(file, found)
            self.budget = budget  # the learner's script gets all of it
        self.limits = {job: LIMIT_S + SLOWER * s for job, s in found["seconds"].items()}
        return found["seen"]

    def _find_wanted(self):
        script = self.write(self.text)
        found, shown = {}, {}
        if "updates" in self.jobs:
            found = self._run([script], ("contract", "updates"))[0]
            shown = torch.load(found["updates"].folder / RUN, weights_only=True)
            self._choose_options(found["contract"].observations, shown)
        found |= self._run([script], [job for job in self.jobs if job not in found])[0]
        return dict(run=shown, seen={job: task.observations for job, task in found.items()},
                    seconds={job: task.seconds for job, task in found.items()})

    def _choose_options(self, contract, shown):
        """What else the jobs need, from what the milestone's script shows in the first and in a run
        with gradients from outside."""
        calls = self.folder / f"{self.milestone.slug}.pt"
        torch.save(shown, calls)
        world = next((ranks for ranks in (4, 5) if any(
            size > ranks and size % ranks for size in shown["groups"])), 4)
        here, there = (contract[what][1] for what in (
            "the fields of Hyperparameters", "the defaults on a machine with a GPU"))
        glossary = load_glossary()
        choices = glossary.column("choices")
        paths = [(name, value) for name, some in choices.items() if name in here for value in some]
        machine = [name for name in here if here[name] != there[name]
                   and name not in ("compile", *choices)]
        trials = {why: {name: value} for name, some in glossary.column("refused").items()
                  for why, value in some.items()} | BROKEN_INPUT
        trials = {why: change for why, change in trials.items() if next(iter(change)) in here}
        self.options = {
            "more ranks": dict(world=world), "kernels": dict(machine=machine),
            "refusals": dict(machine=machine, paths=paths, trials=trials),
            "model": dict(calls=calls),
            "model on a GPU": dict(calls=calls, machine=machine, choices=paths)}

    def differing(self, text: str) -> dict[str, list[Deviation]]:
        """{job: differences} of all jobs that are done with a script; those of a job that shows
        what the milestone's shows are []. No more are done with one that hangs."""
        script, wanted = self.write(text), self.wanted
        jobs = [job for job in self.jobs if wanted[job]]  # there may be no kernels, say
        results = self._run([script], [job for job in jobs if job in FIRST])[0]
        if not any(result.hung for result in results.values()):
            results |= self._run([script], [job for job in jobs if job not in FIRST])[0]
        return {job: differences(wanted[job], results[job].observations)
                for job in jobs if job in results}

    def first_differences(self, texts: Iterable[str], jobs: Iterable[str]) -> list[tuple | None]:
        """Looks at scripts in these jobs, in their order, each up to the first that differs.

        Returns for each script (difference, job, observations), or None if none differs.
        """
        scripts = [self.write(text) for text in texts]
        found = dict.fromkeys(scripts)
        for job in jobs:
            wanted = self.wanted[job]
            same = [script for script in scripts if found[script] is None]
            for script, results in zip(same, self._run(same, [job]), strict=True):
                seen = results[job].observations
                if differ := differences(wanted, seen):
                    found[script] = differ[0], job, seen
        return list(found.values())

    def diagnose(self, mixture: Mixture, verdict: Verdict) -> str:
        """The words of the slip, or of two slips in two blocks, that show just what the verdict's
        blocks show, or ""."""
        lines = mixture.script(verdict.names)[0].split("\n")

        def likeness(wrong):
            return SequenceMatcher(None, lines, wrong[1].split("\n"), autojunk=False).ratio()

        slips = [(slip, text) for name in verdict.names
                 for slip, text in applicable_slips(name, self.milestone, self.text)]
        slips.sort(key=likeness, reverse=True)
        first = {name: [slip for slip, _ in slips if slip.block == name][:PAIRS]
                 for name in verdict.names}
        pairs = [(f"{a.words} {b.words}", text) for one, other in combinations(first, 2)
                 for a in first[one] for b in first[other] if (text := b.apply(a.apply(self.text)))]
        wrongs = [(slip.words, text) for slip, text in slips[:SLIPS]] + pairs
        for words, text in sorted(wrongs, key=likeness, reverse=True)[:SLIPS]:
            results = self._run([self.write(text)], [verdict.job])[0]
            if alike(results[verdict.job].observations, verdict.seen):
                return words
        return ""

    def write(self, text: str) -> Path:
        """A script of this text, in a folder of its own."""
        script = Path(tempfile.mkdtemp(dir=self.folder), "train_gpt.py")
        script.write_text(text, encoding="utf-8")
        return script

    def _run(self, scripts, jobs):
        """{job: Task} of each script, all at their end."""
        tasks = [{job: Task(script, job, self.values, self.limits.get(job, self.budget),
                            self.options.get(job, {})) for job in jobs} for script in scripts]
        self.budget -= run_tasks([task for some in tasks for task in some.values()], self.budget)
        return tasks


def located(difference: Deviation, origin: list[tuple[str, int]]) -> Deviation:
    """A difference of a mixed script, with the learner's own line number, or 0 where the line is
    the milestone's."""
    owner, line = origin[difference.line - 1] if difference.line else ("learner", 0)
    if owner == "learner":
        return replace(difference, line=line)
    return replace(difference, line=0, source=f"the milestone's {difference.source}",
                   milestone_line=line)


def in_words(difference: Deviation, also: str = "") -> tuple[str, str]:
    """expected and got of a difference, for people; also: further signs of the same fault."""
    got, source = difference.got, difference.source
    if difference.line:
        got = f"line {difference.line}: {got.removeprefix('it stops: ')}"
        source = source and f"`{source}`"
    got += (f", at {source}" if source else "") + (f". Further signs: {also}" if also else "")
    return f"{difference.what}: {difference.expected}", got


def examine(source: bytes, examination: Examination) -> Iterator[Outcome]:
    """Yields the outcomes of a script: the looks that agree, then each block that differs.

    source: the script's bytes, which `check_syntax` passes. Raises TimeoutError at the
    examination's deadline.
    """
    text = source.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    found = examination.differing(text)
    yield from (Outcome(job) for job, differ in found.items() if not differ)
    different = {job: differ for job, differ in found.items() if differ}
    if not different:
        return
    try:
        mixture = Mixture(examination.text, text, examination.parent)
    except ValueError as error:  # two blocks of one name
        yield Outcome("blocks", "each name is defined once", str(error))
        return
    try:
        outcomes = _judged(examination, mixture, list(different))
        late = []
    except TimeoutError:
        outcomes, late = [], [Outcome("time", "which block is at fault", "no time to find out",
                                      "--timeout gives it more time.")]
    words = "" if any(trace.ALL[job].world == 1 for job in different) else MORE_RANKS
    if all(outcome.passed for outcome in outcomes):  # no block by itself is at fault, or no time
        for job, differ in different.items():
            also = further_signs(differ, examination.wanted.get(job, {}))
            yield Outcome(job, *in_words(differ[0], also), words,
                          block=mixture.block_at(differ[0].line))
    elif words:
        outcomes = [replace(outcome, meaning=outcome.meaning or words * (not outcome.passed))
                    for outcome in outcomes]
    yield from outcomes + late


def _judged(examination, mixture, jobs):
    """The outcomes of the blocks that are missing or differ, in their order."""
    def test(groups):
        mixed = [mixture.script(names) for names in groups]
        found = examination.first_differences([text for text, _ in mixed], jobs)
        return [seen and (located(seen[0], origin), *seen[1:])
                for seen, (_, origin) in zip(found, mixed, strict=True)]

    part = "your differing blocks, each by itself in the milestone's script"
    names = examination.wanted["contract"]["names"][1]
    outcomes = [Outcome(name, f"{name}{names[name]}, which tools call by this name",
                        "no such name in the script", part=part)
                for name in mixture.lacking() if name in names]
    for verdict in judge(mixture, test):
        if verdict.replaced:
            outcomes.append(Outcome(
                f"{verdict.names[0]}, not judged: your {verdict.replaced} replaces the code that "
                "needs more of it", part=part))
            continue
        if verdict.difference is None:
            outcomes += [Outcome(name, part=part) for name in verdict.names]
            continue
        words = examination.diagnose(mixture, verdict)
        if len(verdict.names) > 1:
            words = f"{TOGETHER} {words}".strip()
        title = f"{' and '.join(verdict.names)} ({', '.join(map(mixture.span, verdict.names))})"
        also = further_signs(differences(examination.wanted[verdict.job], verdict.seen),
                             examination.wanted[verdict.job])
        outcomes.append(Outcome(title, *in_words(verdict.difference, also), words, part,
                                verdict.names[0]))
    return outcomes
