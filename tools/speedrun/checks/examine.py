"""Goes through the checks of a milestone, group by group, until one does not pass; needs torch."""

import contextlib
import gc
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from speedrun.checks import (
    adam,
    contract,
    flex,
    gradients,
    model,
    optimizer,
    precision,
    ranks,
    scalars,
    schedule,
    start,
    training,
)
from speedrun.checks.catalog import Catalog
from speedrun.checks.outcome import NotThere, Outcome
from speedrun.checks.subject import Subject, explain, line_in
from speedrun.manifest import Milestone

# The name of a check, under which what the function raises is reported, and the function.
# A function may yield outcomes of several names.
CONTRACT = [
    ("names", contract.check_names),
    ("fields", contract.check_fields),
    ("parse_args", contract.check_parse_args),
    ("forward", contract.check_forward),
    ("matrices", contract.check_matrices),
    ("forward's window", contract.check_window_argument),
    ("main", contract.check_main),
]
PARTS = [
    ("hyperparameters", schedule.check_defaults),
    ("parameter count", start.check_parameter_count),
    ("untied head", model.check_head),
    ("logits", model.check_features),
    ("flex attention", flex.check_flex),
    ("gradients", gradients.check_gradients),
    ("learned scalars", scalars.check_scalars),
    ("initial values", start.check_start),
    ("initial loss", start.check_first_loss),
    ("bfloat16 storage", precision.check_storage),
    ("bfloat16 forward", precision.check_forward),
    ("orthogonal updates", optimizer.check_muon),
    ("Adam", adam.check_adam),
    ("learning rate", schedule.check_learning_rate),
    ("window schedule", schedule.check_window),
]
BEHAVIOUR = [
    ("training losses", training.check_training),
    ("two ranks", ranks.check_ranks),
]


def examine(
    script: Path, milestone: Milestone, catalog: Catalog,
    begin: Callable[[str, str], None] = lambda group, name: None,
) -> Iterator[tuple[str, Outcome]]:
    """Yields (group, outcome) for each check; begin(group, name) is called before each.

    Whatever the script raises becomes an outcome. The groups are syntax, import, contract, parts
    and behaviour; none begins before all outcomes of the one before have passed.
    """
    with tempfile.TemporaryDirectory(prefix="check_train-") as folder, _quietly(folder):
        subject = Subject(script, milestone, Path(folder))
        groups = [("syntax", [("syntax", _check_syntax)]), ("import", [("import", _check_import)]),
                  ("contract", CONTRACT), ("parts", PARTS), ("behaviour", BEHAVIOUR)]
        for group, checks in groups:
            failed = False
            for name, function in checks:
                if not catalog.applies(name, milestone):
                    continue
                begin(group, name)
                for outcome in _guarded(name, function, subject):
                    failed |= not outcome.passed
                    yield group, outcome
            if failed:
                return


def _guarded(name, function, subject) -> Iterator[Outcome]:
    """The outcomes of a function; what the script raises in it is one more."""
    try:
        yield from function(subject)
    except NotThere as error:
        yield Outcome(name, error.expected, error.got, error.meaning)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # sys.exit and the like too
        yield Outcome(name, "your script runs to the end of the check",
                      f"it stops: {explain(error, subject.script)}",
                      _meaning(error, subject.script))


def _meaning(error, script):
    """What usually lies behind an exception."""
    if line_in(error, script) is None:
        return ("No line of your script is on the way to this error, so the fault may be the "
                "checker's own.")
    if "not used in producing loss" in str(error):
        return "A parameter of the model never reaches the loss: use it, or remove it."
    if isinstance(error, AssertionError):
        return ("An assertion does not hold. If it is the one about the optimizers: a parameter is "
                "in no group, or in two.")
    return ""


def _check_syntax(subject):
    """Whether Python would run the file. An import is laxer: it does not decode comments."""
    source = subject.script.read_bytes()
    try:
        source.decode("utf-8")
        compile(source, str(subject.script), "exec", dont_inherit=True)
    except UnicodeDecodeError as error:
        line, byte = source.count(b"\n", 0, error.start) + 1, source[error.start]
        yield Outcome("syntax", "a Python file", f"line {line}: byte 0x{byte:02x} is not UTF-8",
                      "Save the file as UTF-8: Python and the tools read it so.")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        text = getattr(error, "msg", None) or str(error)
        yield Outcome("syntax", "a Python file", f"{where}{text}")
    else:
        yield Outcome("syntax")


def _check_import(subject):
    """Whether it can be imported, without doing anything."""
    try:
        _ = subject.module
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        yield Outcome("import", "importing the script defines its parts and runs nothing",
                      explain(error, subject.script),
                      "What shall run stands below `if __name__ == \"__main__\":`."
                      if isinstance(error, SystemExit) else "")
        return
    yield Outcome("import")


@contextlib.contextmanager
def _quietly(folder):
    """Runs in the folder, where stray files do no harm, without warnings."""
    before = os.getcwd()
    os.chdir(folder)
    gc.freeze()  # a script collects garbage at its end; what is here already need not be searched
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.unfreeze()
        os.chdir(before)
