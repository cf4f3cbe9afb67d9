"""Finds out from a snapshot itself how it will run on this machine, and says so in a line."""

import ast
import operator
from textwrap import shorten
from types import ModuleType

from speedrun.base.venv import install_command
from speedrun.doctor.report import ABSENT, FIX, NOTE, OK, MilestoneFinding
from speedrun.doctor.storage import count_shards, fetch
from speedrun.history.manifest import Manifest, Milestone
from speedrun.run.data import shards_read
from speedrun.run.fit_batch import MARGIN
from speedrun.run.paths import paths_taken, switches
from speedrun.run.predicted import find_prediction, largest_predicted
from speedrun.scripts.find import find_script
from speedrun.scripts.load import load_snapshot
from speedrun.scripts.sizes import micro_batches


def milestone_check(
    milestone: Milestone, torch: ModuleType | None, manifest: Manifest, scale: str, ranks: int,
    memory: int = 0,
) -> MilestoneFinding:
    """The line of a milestone, found by importing its script.

    torch: None if it cannot be imported; scale and ranks: those that would be chosen; memory: MiB
    of the smallest GPU, 0 where it is not known.
    """
    steps, tokens = milestone.train_steps, milestone.tokens_read
    needed = shards_read(steps, tokens) if steps and tokens else 0  # for a full run, record scale
    here, _ = count_shards()
    facts = dict(shards_needed=needed)

    def line(status, text, do=None):
        return MilestoneFinding(milestone.name, status, text, do, **facts)

    if torch is None:
        return line(ABSENT, "not known without torch")
    try:
        source = milestone.script.read_text(encoding="utf-8")
        module = load_snapshot(milestone.script)
        hyperparameters = vars(module.Hyperparameters())
    except Exception as error:  # whatever an import comes upon
        fault = f"{type(error).__name__}: {error}"
        return line(FIX, shorten(fault, 200, placeholder=" …"), install_command())
    if missing := missing_names(ast.parse(source), module):
        return line(FIX, f"torch {torch.__version__} lacks {', '.join(missing)}", install_command())

    facts["switches"] = {name: hyperparameters[name] for name in switches(source)}
    text = paths_taken(source, hyperparameters, torch.cuda.is_available())
    sizes = hyperparameters | manifest.overrides(milestone, scale)
    possible = [n for n in range(1, ranks + 1) if micro_batches(sizes, n)]
    if ranks not in possible:
        return line(
            FIX, f"{text}; a step does not divide among {ranks} ranks",
            f"python tools/run_milestone.py {milestone.id} --nproc {max(possible, default=1)}")
    if needed:
        text += f"; {min(here, needed)} of {needed} shards"
    do = None
    if scale == "record" and memory and torch.cuda.is_available():
        said, do = _what_fits(milestone, ranks, memory)
        text += said
    if scale == "record" and here < needed:
        return line(NOTE, text, fetch(needed))
    return line(NOTE if do else OK, text, do)


def _what_fits(milestone, ranks, memory):
    """What is predicted to fit into `memory` MiB, and a command, where it is less than the
    script's own micro batch: that which tries it or, if nothing fits, trains tiny; else nothing and
    None."""
    script, run = find_script(milestone.id), f"python tools/run_milestone.py {milestone.id}"
    own, prediction = script.hyperparameters, find_prediction(script, {})
    if prediction is None:
        return "", None
    found = largest_predicted(prediction, own, ranks, MARGIN * memory * 2**20)
    if found is None:
        return "; predicted to be too large for this memory", f"{run} --scale tiny"
    shorter = found.shortened(own)
    if not shorter and found.sequences >= own["micro_batch_size"]:
        return "", None
    do = f"{run} --device-batch auto{shorter}"
    return f"; predicted to fit: {found} tokens at a time", do


def missing_names(tree: ast.AST, module: ModuleType) -> list[str]:
    """The names, like torch.nn.functional.rms_norm, that a script takes from the modules that it
    imports and that are not there, in order."""
    missing = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        try:
            owner = operator.attrgetter(ast.unparse(node.value))(module)
        except AttributeError:  # a local name, or what is in a module that is not there
            continue
        if isinstance(owner, ModuleType) and not hasattr(owner, node.attr):
            missing.add(f"{owner.__name__}.{node.attr}")
    return sorted(missing)

