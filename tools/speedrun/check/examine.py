"""Examines a script: its trace beside the milestone's, and a verdict on every block that differs.

Started by speedrun.check.process with a folder that holds source.py, the milestone's id, a time
limit in seconds and the id of the process that started it; the outcomes are lines of answers.jsonl
there.
"""

import ast
import json
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from speedrun.check import trace
from speedrun.check.differences import Difference, alike, differences
from speedrun.check.outcome import Outcome
from speedrun.check.slips import slips_of
from speedrun.check.transplant import Mixture, Verdict, judge
from speedrun.check.worker import Result, Task, Worker
from speedrun.history.manifest import Milestone, load_manifest
from speedrun.scripts.find import default_hyperparameters

SIZES = Path(__file__).with_name("sizes.toml")
ODD = 0.93  # times a learning rate and the like: nobody writes such a number into a script
LIMIT_S, SLOWER = 8, 10  # a job may take LIMIT_S and so many times what the milestone's takes
SLIP_BUDGET_S = 8  # for the slips that might say in words what is wrong


def odd_values(milestone: Milestone) -> dict[str, object]:
    """The hyperparameters at which the milestone and scripts like it are traced."""
    manifest, sizes = load_manifest(), tomllib.loads(SIZES.read_text(encoding="utf-8"))
    fixed = dict(sizes["common"])
    for ancestor in reversed(manifest.lineage(milestone)):  # the nearest one's numbers count
        fixed |= sizes.get("only", {}).get(ancestor.id, {})
    values, tiny = {}, manifest.overrides(milestone, "tiny")
    for name, default in default_hyperparameters(milestone.script).items():
        value = fixed.get(name, tiny.get(name, default))
        if isinstance(value, float) and name not in fixed:
            value *= ODD
        if value is not None and not isinstance(value, str):
            values[name] = value
    return values


class Examination:
    """A milestone's trace, beside which scripts are set.

    worker: runs the jobs; its folder takes the scripts. Raises what is wrong with the milestone.
    """

    def __init__(self, worker: Worker, milestone: Milestone):
        self.worker, self.milestone = worker, milestone
        self.values = odd_values(milestone)
        self.text = milestone.script.read_text(encoding="utf-8")
        self.script = self.write(self.text)
        self.wanted: dict[str, Result] = {}
        self.options: dict[str, dict] = {}

    def write(self, text: str) -> Path:
        """A script of this text, in a folder of its own."""
        script = Path(tempfile.mkdtemp(dir=self.worker.folder), "train_gpt.py")
        script.write_text(text, encoding="utf-8")
        return script

    def task(self, script: Path, job: str) -> Task:
        limit = LIMIT_S + SLOWER * self.wanted[job].seconds if job in self.wanted else 60
        return Task(script, job, self.values, limit, self.options.get(job, {}))

    def reference(self):
        """A generator: traces the milestone itself, once."""
        if "updates" in self.wanted:
            return
        for job in ("contract", "updates"):
            self.wanted[job] = yield self.task(self.script, job)
        seen = self.wanted["contract"].observations
        here, there = (seen[what][1] for what in (
            "the fields of Hyperparameters", "the defaults on a machine with a GPU"))
        machine = [name for name in here if here[name] != there[name] and name != "compile"]
        self.options["refusals"] = dict(machine=machine)
        self.options["model"] = dict(
            calls=str(self.wanted["updates"].folder / "calls.pt"), machine=machine)
        for job in trace.JOBS:
            if job not in self.wanted:
                self.wanted[job] = yield self.task(self.script, job)
            if not self.wanted[job].observations:
                raise RuntimeError(f"{self.milestone.name}: nothing seen in {job}")

    def trace(self, script: Path):
        """A generator: all jobs of a script, {job: Result}; none after one that did not end."""
        results = {}
        first = ("contract", "schedules", "updates")
        for job in (*first, *trace.JOBS):
            if job not in results:
                while "model" not in self.options and job not in first:
                    yield None
                results[job] = yield self.task(script, job)
                if results[job].hung:
                    break
        return results

    def differing(self, results: dict[str, Result]) -> dict[str, list[Difference]]:
        """{job: differences} of the jobs that show something else than the milestone's."""
        found = {job: differences(self.wanted[job].observations, results[job].observations)
                 for job in trace.JOBS if job in results}
        return {job: some for job, some in found.items() if some}

    def test(self, mixture: Mixture, jobs: list[str]) -> Callable:
        """test for `judge`: looks at these jobs, in their order, up to one that differs."""
        def test(names):
            text, origin = mixture.script(names)
            script = self.write(text)
            for job in jobs:
                result = yield self.task(script, job)
                found = differences(self.wanted[job].observations, result.observations)
                if found:
                    return located(found[0], origin), job, result.observations
            return None

        return test

    def diagnose(self, mixture: Mixture, verdict: Verdict):
        """A generator: the words of the slip that shows just what the verdict's block shows."""
        if len(verdict.names) > 1:
            return None
        name = verdict.names[0]
        slips = [(slip, slip.apply(self.text)) for slip in slips_of(name, self.text)]
        mine = _code(mixture.script((name,))[0])
        for slip, text in slips:  # the same code needs no look
            if _code(text) == mine:
                return slip.words
        end = time.monotonic() + SLIP_BUDGET_S
        for slip, text in slips:
            if time.monotonic() < end:
                result = yield self.task(self.write(text), verdict.job)
                if alike(result.observations, verdict.seen):
                    return slip.words
        return None


def located(difference: Difference, origin: list[tuple[str, int]]) -> Difference:
    """A difference of a mixed script, with the learner's own line number, or 0 where the line is
    the milestone's."""
    if not difference.line or difference.line > len(origin):
        return difference
    owner, line = origin[difference.line - 1]
    if owner == "learner":
        return replace(difference, line=line)
    return replace(difference, line=0, source=f"the milestone's {difference.source}")


def in_words(difference: Difference) -> tuple[str, str]:
    """expected and got of a difference, for people."""
    got = difference.got
    if difference.line:
        got = f"line {difference.line}: {got.removeprefix('it stops: ')}"
        got += f", at `{difference.source}`" if difference.source else ""
    elif difference.source:
        got += f", at {difference.source}"
    return f"{difference.what}: {difference.expected}", got


def _code(text):
    """A script without comments and layout."""
    return ast.dump(ast.parse(text))


def check_syntax(source: bytes) -> Outcome:
    """Whether Python would run the file. An import is laxer: it does not decode comments."""
    try:
        source.decode("utf-8")
        compile(source, "train_gpt.py", "exec", dont_inherit=True)
    except UnicodeDecodeError as error:
        line, byte = source.count(b"\n", 0, error.start) + 1, source[error.start]
        return Outcome("syntax", "a Python file", f"line {line}: byte 0x{byte:02x} is not UTF-8",
                       "Save the file as UTF-8: Python and the tools read it so.")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        return Outcome("syntax", "a Python file",
                       f"{where}{getattr(error, 'msg', None) or error or type(error).__name__}")
    return Outcome("syntax")


def examine(source: bytes, examination: Examination, tell: Callable[[Outcome], None]) -> None:
    """Tells the outcomes of a script: the looks that agree, then each block that differs.

    source: the script's bytes. Raises TimeoutError when the worker's time is up.
    """
    syntax = check_syntax(source)
    tell(syntax)
    if not syntax.passed:
        return
    text = source.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    drive = examination.worker.drive
    _, results = drive([examination.reference(), examination.trace(examination.write(text))])
    different = examination.differing(results)
    for job in trace.JOBS:
        if job in results and job not in different:
            tell(Outcome(job))
    if not different:
        return
    try:
        mixture = Mixture(examination.text, text)
    except ValueError as error:  # two blocks of one name
        tell(Outcome("blocks", "each name is defined once", str(error)))
        return
    looks = [Outcome(job, *in_words(found[0]), block=_block_at(mixture, found[0].line))
             for job, found in different.items()]
    try:
        (outcomes,) = drive([_judged(examination, mixture, list(different))])
    except TimeoutError:
        outcomes = []
    if all(outcome.passed for outcome in outcomes):  # no block by itself is at fault, or no time
        for outcome in looks:
            tell(outcome)
    for outcome in outcomes:
        tell(outcome)


def _judged(examination, mixture, jobs):
    """A generator: the outcomes of the blocks that are missing or differ, in their order."""
    found, names = [], examination.wanted["contract"].observations["names"][1]
    part = "your blocks that differ, each alone in the milestone's script"
    for name in mixture.lacking():
        if name in names:
            found.append(Outcome(name, f"{name}{names[name]}, which tools call by this name",
                                 "no such name in the script", part=part))
    verdicts = yield from judge(mixture, mixture.candidates(), examination.test(mixture, jobs))
    for verdict in verdicts:
        if verdict.difference is None:
            found += [Outcome(name, part=part) for name in verdict.names]
            continue
        words = yield from examination.diagnose(mixture, verdict)
        expected, got = in_words(verdict.difference)
        if len(verdict.names) > 1:
            words = "Only together they show this: each of them alone fits, or stops the script."
        where = ", ".join(filter(None, map(mixture.span, verdict.names)))
        title = " and ".join(verdict.names) + (f" ({where})" if where else "")
        found.append(Outcome(title, expected, got, words or "", part, verdict.names[0]))
    return found


def _block_at(mixture, line):
    """The name of the learner's block that holds a line, or ""."""
    return next((name for name, block in mixture.learner.items()
                 if block.line <= line <= block.line + block.text.count("\n")), "")


def main(folder: Path, id: str, limit: float, parent: int) -> None:
    """Examines source.py of the folder and writes the answers; the last line says that it ended."""
    with open(folder / "answers.jsonl", "a", encoding="utf-8") as file:
        def write(answer):
            file.write(json.dumps(answer) + "\n")
            file.flush()

        worker = Worker(folder, time.monotonic() + limit, parent)
        try:
            examine((folder / "source.py").read_bytes(),
                    Examination(worker, load_manifest().get(id)),
                    lambda outcome: write(asdict(outcome)))
        except TimeoutError:
            write(asdict(Outcome("time", f"an answer within {limit:g} s", "none: the script was "
                                 "stopped", "--timeout gives it more time.")))
        write(dict(end=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)
