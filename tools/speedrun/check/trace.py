"""Observes what one script does: each job is run in a process of its own by speedrun.check.worker.

A job gets the imported script and writes observations, {what: [kind, value, tolerance]}; the
kinds are those of speedrun.check.differences. Nothing here knows a milestone: what to look at
follows from the script.
"""

import dataclasses
import importlib.util
import inspect
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import torch

from speedrun.check import trace_generation, trace_model, trace_precision, trace_runs
from speedrun.check.spy import Spy
from speedrun.check.watched import run_watched, triton
from speedrun.check.weights import arguments
from speedrun.compat import FakeTensorMode
from speedrun.history.glossary import load_glossary
from speedrun.scripts.sizes import length_names

UNMASKED = 16_640  # tokens: a dense mask for so many takes gigabytes
# What tools call by name in any milestone; schedules, functions of (step, args), come on top.
CONTRACT = ("Hyperparameters", "parse_args", "GPT", "validate", "load_model", "encode_prompt",
            "generate", "main")


class Observations(dict):
    """What a job has seen so far, {what: [kind, value, tolerance]}."""

    def note(self, what, kind, value, tolerance=0.0):
        """Keeps a value under a description that messages show."""
        self[what] = [kind, value, tolerance]

    def fact(self, what, value):
        """Keeps what has to be just so."""
        self.note(what, "fact", str(value))

    @contextmanager
    def guard(self, what):
        """Whatever the script raises inside becomes an observation; the job goes on."""
        try:
            yield
        except BaseException as error:
            self[what] = ["error", *explain(error)]


def explain(error):
    """An exception as (text, line number or 0, text of the line): the last line of the script."""
    what = re.sub(r"\[rank\d+\]:\[.+?\] ", "", " ".join(str(error).split()))  # rank and time
    text = f"{type(error).__name__}: {what}" if what else type(error).__name__
    if isinstance(error, SystemExit):
        text = f"it ends the process: sys.exit({error.code!r})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == os.environ.get("CHECKED_SCRIPT"):
            return text[:300], frame.lineno, (frame.line or "").strip()[:100]
    return text[:300], 0, ""


def _schedules(module):
    """{name: function} of the script's functions of (step, args)."""
    return {name: value for name, value in vars(module).items() if inspect.isfunction(value)
            and list(inspect.signature(value).parameters) == ["step", "args"]}

def contract(module, values, note, **_):
    """Names, fields, defaults here and on a GPU, and the command line."""
    names = dict.fromkeys(_schedules(module), "(step, args)")
    note.note("names", "has", names | {n: "" for n in CONTRACT if hasattr(module, n)})
    with note.guard("the fields of Hyperparameters"):
        note.note("the fields of Hyperparameters", "has", _fields(module.Hyperparameters))
    gpu = mock.patch.multiple(torch.cuda, is_available=lambda: True,
                              get_device_capability=lambda *_: (9, 0))  # an H100's
    with note.guard("the defaults on a machine with a GPU"), gpu, triton():
        other = runpy.run_path(module.__file__)["Hyperparameters"]
        note.note("the defaults on a machine with a GPU", "has", _fields(other))
    if "flash_attn" in Path(module.__file__).read_text(encoding="utf-8"):
        _other_machines(module, note)
    with note.guard("parse_args"):
        parsed = {}
        for field in dataclasses.fields(module.Hyperparameters):
            default = getattr(module.Hyperparameters(), field.name)
            other = {int: 12345, float: 0.375, str: "other_text"}.get(type(default), not default)
            value = getattr(module.parse_args([f"--{field.name}={other}"]), field.name)
            parsed[field.name] = f"{type(value).__name__} {value!r} from --{field.name}={other}"
        note.note("parse_args", "has", parsed)
    with note.guard("parse_args of a wrong option"):
        note.note("parse_args of a wrong option", "has", {
            option: _exit_code(module.parse_args, [option])
            for option in ("--no_such_field=1", "--save_checkpoint=maybe", "--seed=many", "5")})
    with note.guard("a start with --help"):
        sys.argv = [module.__file__, "--help"]
        how = _exit_code(runpy.run_path, module.__file__, None, "__main__")
        note.fact("a start with --help", how)


def _other_machines(module, note):
    """The defaults on GPUs of several generations, with packages for attention that are not here,
    and with an older torch."""
    find_spec, this = importlib.util.find_spec, torch.__version__
    for machine, capability, version in (
            ("a T4", (7, 5), this), ("an A100", (8, 0), this), ("an H100", (9, 0), this),
            ("a B200", (10, 0), this), ("an H100 with torch 2.11", (9, 0), type(this)("2.11.0"))):
        what = f"the defaults on {machine} with FlashAttention's packages"
        with note.guard(what), triton(), mock.patch.multiple(
                torch.cuda, is_available=lambda: True,
                get_device_capability=lambda *_, capability=capability: capability
        ), mock.patch.object(torch, "__version__", version), mock.patch.object(
                importlib.util, "find_spec",
                lambda name, *more: find_spec("torch" if "flash_attn" in name else name, *more)):
            there = runpy.run_path(module.__file__)["Hyperparameters"]
            note.note(what, "has", _fields(there))


def _exit_code(function, *arguments):
    try:
        function(*arguments)
    except SystemExit as error:
        return f"ends with exit code {error.code}"
    return "comes to its end without a word"


def _fields(kind):
    found = {}
    for field in dataclasses.fields(kind):
        value = getattr(kind(), field.name)
        if field.default_factory is not dataclasses.MISSING:  # it depends on time and process
            value = f"{str(value).split('/')[0]}/..."
        found[field.name] = f"{value!r} ({type(value).__name__})"
    return found


def schedules(module, values, note, **_):
    """Every function of (step, args), over all steps of runs of three lengths, and of neighbouring
    ones: where some optimizer steps only every n-th time, boundaries move by parts of n."""
    steps = load_glossary().of_kind("steps", "phase")
    longer = {k: v * 13 if k in steps else v for k, v in values.items()}
    record = vars(module.Hyperparameters())
    settings = {"a short run": values, "the record's hyperparameters": record,
                "longer runs' hyperparameters": longer}
    for whose, some in settings.items():
        for more in range(some.get("adam_every", 1)):
            lengths = {k: some[k] + more for k in ("train_steps", "scheduled_steps") if k in some}
            args = arguments(module, {**some, **lengths})
            where = whose + f", {more} more steps" * (more > 0)
            for name, function in _schedules(module).items():
                _note_schedule(note, name, function, args, where)
            note.note(f"numbers of {where}", "in common", _numbers_of(module, args))


def _numbers_of(module, args):
    """{name: number} of the script's functions of hyperparameters alone that return one: the last
    step of something, say. A script may do without them."""
    found = {}
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value is not module.main and list(
                inspect.signature(value).parameters) == ["args"]:
            with suppress(Exception):  # one that needs more than hyperparameters
                number = value(args)
                if isinstance(number, int | float):
                    found[name] = f"{number:g}"
    return found


def _note_schedule(note, name, function, args, where):
    """Notes a schedule over all steps of a run."""
    what = f"{name} over {where}"
    with note.guard(what):
        found = [function(step, args) for step in range(args.train_steps + 1)]
        note.note(what, "numbers", {
            f"{name}({step}){place} of {args.train_steps} steps": number
            for step, value in enumerate(found) for place, number in _numbered(value)}, 1e-6)
        whole = all(type(value) is int for value in found)
        note.fact(f"type of {name}", f"whole number: {whole}")


def _numbered(value):
    """[(its place in words, number)] of a number, or of a list of them."""
    if isinstance(value, int | float):
        return [("", float(value))]
    numbers = torch.as_tensor(value, dtype=torch.float64)
    return [(f"[{i}]" if numbers.ndim else "", number)
            for i, number in enumerate(numbers.flatten().tolist())]


def refusals(module, values, note, folder, shards, machine, paths, trials, **_):
    """What a run refuses to start with. trials: {what is wrong: {hyperparameter: value}}; a value
    of train_files or val_files is how the names of the shards begin, and that of another file its
    name."""
    seen = {}
    switches = [(field, True) for field in machine] + paths
    record, blocks = vars(module.Hyperparameters()), load_glossary().of_kind("tokens")
    blocks = {name: record[name] for name in blocks if name in record}  # else there are thousands
    for switch, on in [("", True), ("compile", True), *switches]:
        # No data, no memory. What cannot be run in this way is not compared.
        with FakeTensorMode(), torch.no_grad(), suppress(Exception):
            lengths = dict.fromkeys(length_names(values), UNMASKED)
            net = module.GPT(arguments(module, {**values, **blocks, **lengths, switch: on}))
            what, spy = f"{UNMASKED:,} tokens{switch and f' with {switch}={on}'}", Spy()
            try:
                net(*torch.ones(2, 1, UNMASKED, dtype=torch.int64))
                seen[what] = "taken"
            except AssertionError:
                seen[what] = "refused"
            if spy.starts:  # a shorter list may be full, a longer one costs time
                listed = f"document starts that are listed for {what}"
                note.note(listed, "at least", spy.starts, 0.8)
                note.note(f"{listed}, at most", "at most", spy.starts, (1.5, 0))
    for switch, on in switches:
        with torch.no_grad(), suppress(Exception):
            net = module.GPT(arguments(module, {**values, switch: on}))
            what = f"{switch}={on} without compilation"
            try:
                net(*torch.ones(2, 1, 16, dtype=torch.int64))
                seen[what] = "taken"
            except AssertionError:
                seen[what] = "refused"
    note.note("what a model refuses", "in common", seen)
    used = Path(folder, "used")
    used.mkdir(parents=True)
    used.joinpath("log.txt").write_text("a log of another run\n")
    seen = {}
    for what, change in {**trials, "the folder of another run": {}}.items():
        files = {key: f"{shards}/{start}*.bin" for key, start in change.items()
                 if key.endswith("_files")}
        files |= {key: f"{shards}/{name}" for key, name in change.items()
                  if key in ("train_file", "checkpoint", "prefix_file")}
        here = Path(folder, what) if change else used
        try:
            run_watched(module, {**values, "train_steps": 1, **change, **files}, here, Spy())
            seen[what] = "taken"
        except Exception as error:
            own = traceback.extract_tb(error.__traceback__)[-1].filename == module.__file__
            seen[what] = "refused" if own else f"not refused: later {type(error).__name__}"
    kept = used.joinpath("log.txt").read_text() == "a log of another run\n"
    seen["the folder of another run"] = "log kept" if kept else "log written over"
    note.note("what is refused", "has", seen)


@dataclasses.dataclass(frozen=True)
class Job:
    """A function that observes, what it is called in messages, on how many ranks it runs where
    its options do not say, and whether it runs under the spy, whose clocks stand still."""

    function: Callable
    what: str
    world: int = 1
    spied: bool = True


JOBS = {  # in the order in which they are shown
    "contract": Job(contract, "an import of the script"),
    "schedules": Job(schedules, "the schedules"),
    "model": Job(trace_model.model, "the model by itself"),
    "initial weights": Job(trace_runs.beginnings, "the start of runs"),
    "updates": Job(trace_runs.updates, "a run with gradients from outside"),
    "training": Job(trace_runs.training, "a run after a kernel warm-up"),
    "record tokens": Job(trace_runs.record_tokens, "a run with the record's token ids"),
    "two ranks": Job(trace_runs.ranks, "a run on two ranks", world=2),
    "more ranks": Job(trace_runs.more_ranks, "a run on more ranks"),
    "model on a GPU": Job(trace_model.paths, "the model in the ways that a GPU takes"),
    "precision": Job(trace_precision.precision, "runs in bfloat16"),
    "kernels": Job(trace_precision.kernels, "runs with a GPU's kernels"),
    "refusals": Job(refusals, "runs that must be refused"),
}
GENERATION = {  # the same of scripts that generate
    "contract": JOBS["contract"],
    "logits": Job(trace_generation.logits, "the model by itself", spied=False),
    "prompts": Job(trace_generation.prompts, "a prompt", spied=False),
    "tokens": Job(trace_generation.tokens, "tokens that are drawn", spied=False),
    "printing": Job(trace_generation.printing, "what is printed", spied=False),
    "refused answers": Job(trace_generation.refusals, "answers that are refused", spied=False),
}
ALL = JOBS | GENERATION