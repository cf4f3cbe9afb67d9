"""Plans a run: script, scale, hyperparameters, data, ranks and output folder.

Everything except the tokens themselves is checked here, before anything is written.
"""

import importlib.util
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.history.glossary import load_glossary
from speedrun.history.manifest import REPOSITORY, load_manifest
from speedrun.history.schema import nearest
from speedrun.run import conversations, preflight
from speedrun.run.checkpoint import CHECKPOINT, MAKE_ONE, find_checkpoint, scale_of
from speedrun.run.data import (
    BUILTIN,
    FINEWEB,
    fetch_command,
    fingerprint,
    has_shards,
    holds_bytes,
    patterns,
)
from speedrun.run.gpus import (
    BFLOAT16,
    cuda_fault,
    differing,
    find_fault,
    taken_by_others,
    visible_capabilities,
    visible_gpus,
)
from speedrun.run.log import SCRIPT
from speedrun.run.torchrun import Nodes, check_nodes, launcher_command
from speedrun.scripts.find import Script, find_script, reads_options
from speedrun.scripts.sizes import fitting_micro_batch, scaled_phases, whole

ASKED = "as asked"  # why a scale was taken that the user named
AUTO = "auto"  # the device batch that is to be found out
TINY_RUNS = "history/results/tiny.jsonl"
OTHER_TEXT = 0.07  # val_loss: with the text of Python 3.12, 01 ended 0.069 above that of 3.11
OF_BYTES = ("vocabulary", "token")  # kinds that the tiny scale sets for byte-level shards


@dataclass(frozen=True)
class Plan:
    """A run, decided and checked.

    options are the hyperparameters that are passed on (name -> value); data is the folder of the
    shards or conversations, or None if settings name the files; gpus are the names of the visible
    ones; notes are lines for the user on what was chosen, the scale first. auto_batch:
    micro_batch_size will become the largest that fits (speedrun.run.fit_batch); out_is_free: the
    run may take another `out`, because the user did not choose this one.
    """

    script: Script
    scale: str
    options: dict[str, object]
    data: Path | None
    gpus: list[str]
    nproc: int
    nodes: Nodes
    out: Path
    notes: list[str]
    auto_batch: bool = False
    out_is_free: bool = False

    @property
    def fingerprint(self) -> str | None:
        """That of the conversations or of the embedded corpus that it reads; None for others."""
        values = self.hyperparameters
        if "train_file" in values:
            return conversations.fingerprint(values["train_file"], values["val_file"])
        return fingerprint(self.data) if self.data else None

    @property
    def ranks_dir(self) -> Path:
        """The launcher's folder for the ranks' stderr during the run (nodes may share `out`)."""
        return self.out / self.nodes.ranks

    @property
    def command(self) -> list[str]:
        """The command line that runs it on this machine's ranks: each writes stderr to a file below
        ranks_dir; stdout is shared, and only rank 0 prints there. A script that generates is one
        plain process."""
        if self.script.generates:
            return [sys.executable, *self.script_command]
        return [
            sys.executable, *launcher_command(self.nodes), f"--nproc-per-node={self.nproc}",
            "--redirects=2", f"--log-dir={short(self.ranks_dir)}", *self.script_command,
        ]

    @property
    def script_command(self) -> list[str]:
        """The script and its options; Python runs it as a world of one rank."""
        log_dir = {} if self.script.generates else {"log_dir": short(self.out)}
        return [short(self.script.path),
                *(f"--{name}={value}" for name, value in {**self.options, **log_dir}.items())]

    @property
    def hyperparameters(self) -> dict[str, object]:
        """The script's defaults, replaced by the options, each in its type; None if a default is
        not known."""
        values = {**self.script.hyperparameters, **self.options}
        return {name: self.script.typed(name, value) for name, value in values.items()}


def make_plan(
    target: str, *, scale: str | None = None, data: Path | None = None, steps: int | None = None,
    device_batch: int | str | None = None, settings: Sequence[str] = (), nproc: int | None = None,
    nodes: Nodes | None = None, out: Path | None = None, save_checkpoint: bool = False,
    start: Path | None = None, for_elsewhere: bool = False,
) -> Plan:
    """The Plan for a target: a milestone's id, `train` or the path of a train_gpt.py.

    scale: "record", "tiny" or None to choose; data: folder of shards or, for a script that reads
    conversations, of these; steps: optimizer steps;
    device_batch: sequences per forward pass per rank, or AUTO for as many as fit; settings:
    "name=value" strings, which have the last word; nproc: ranks on this machine (None: one per
    visible GPU, one without); nodes: the machines, if several; out: folder for log and results
    (None: a fresh one below runs/); start: the run, or its checkpoint, from which this one starts;
    for_elsewhere: whether the command is only printed, so that
    GPUs and shards that this machine lacks become notes. Raises UserError or ManifestError, both
    with one line, and ModuleNotFoundError without torch.
    """
    script = find_script(target)
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError(name="torch")
    if script.milestone is None and not reads_options(script.path.read_bytes()):
        raise UserError(f"{short(script.path)} does not read its command line, on which"
                        " hyperparameters are passed; add a parse_args like 00's")
    nodes = nodes or Nodes()
    check_nodes(nodes)
    gpus, notes = visible_gpus(), []
    fault = cuda_fault() if gpus else find_fault()
    gpus = [] if fault else gpus
    capability = min(visible_capabilities()[:nproc], default=None) if gpus else None
    chosen = dict(name_and_value(setting, script) for setting in settings)
    start = _start_of(script, start, chosen)
    scale, reason = choose_scale(scale, data, gpus, start, capability, fault)
    if not script.generates:
        notes.append(f"scale: {scale} ({reason})")
    notes += filter(None, [differing(gpus[:nproc]), taken_by_others()] if gpus else [])

    def check_here(check, *arguments):
        try:
            return check(*arguments)
        except preflight.NotHere as error:
            if not for_elsewhere:
                raise
            notes.append(f"not on this machine: {error}")

    elsewhere = for_elsewhere and scale == "record"
    check_here(preflight.check_gpus, nproc, gpus, elsewhere, fault)
    if script.generates and (nproc or nodes.count) > 1:
        raise UserError(f"{short(script.path)} is one process; leave --nproc and --nnodes out", 2)
    if script.generates and (steps or device_batch or save_checkpoint):
        raise UserError(f"{short(script.path)} trains nothing; leave --steps, --device-batch and"
                        " --save-checkpoint out", 2)
    nproc = 1 if script.generates else nproc or len(gpus) or 1
    out_is_free, out = out is None, out or fresh_out(script.name)
    check_out(out, nodes)

    options = _sizes(script, scale, gpus, notes)
    if capability and capability < BFLOAT16 and "bf16" in script.hyperparameters:
        options["bf16"] = False
        notes.append(f"bf16: off ({gpus[0]} has no bfloat16 tensor cores)")
    if start is not None:
        options["checkpoint"] = short(start)
    folder, files = _choose_data(script, scale, data, chosen)
    options |= files
    if scale == "tiny" and "train_files" in files and folder != BUILTIN and not holds_bytes(folder):
        of_bytes = load_glossary().of_kind(*OF_BYTES)
        options = {k: v for k, v in options.items() if k not in of_bytes}
        notes.append("vocabulary: the script's own (the shards do not hold bytes)")
    steps = whole(chosen.get("train_steps")) or steps
    options |= _schedule(script, options, chosen, steps, notes)
    options |= _micro_batch(script, options, chosen, device_batch, nproc * nodes.count, notes)
    if save_checkpoint:
        options["save_checkpoint"] = True
    options |= chosen

    is_auto = device_batch == AUTO and "micro_batch_size" not in chosen
    plan = Plan(script, scale, options, folder, gpus, nproc, nodes, out, notes,
                auto_batch=is_auto, out_is_free=out_is_free)
    try:
        preflight.check_values(plan.hyperparameters, script.hyperparameters, nproc * nodes.count,
                               bool(gpus) or elsewhere, capability)
    except UserError as error:
        if not settings or scale != "tiny" or reason == ASKED:
            raise
        raise UserError(f"{error}; the scale is tiny ({reason})", error.status) from None
    _note_run(plan, is_own=not (settings or steps))
    _check_files(plan, check_here)
    return plan


def _sizes(script, scale, gpus, notes):
    """The hyperparameters of the scale, as this machine's GPUs need them."""
    options = dict(script.tiny) if scale == "tiny" else {}
    for name, switch, unit in load_glossary().multiples() if gpus else ():
        used = options.get(switch, switch in script.hyperparameters)
        if used and options.get(name, 0) % unit:
            options[name] = unit
            notes.append(f"{name}: {unit} ({switch} needs it on a GPU)")
    if scale == "tiny" and script.milestone is None:
        notes.append(f"tiny sizes and rates: those of {script.tiny_of.name}, the nearest milestone")
    return options


def _schedule(script, options, chosen, steps, notes):
    """The steps, if any are asked for, and the phases of the schedule in proportion to them."""
    if steps is None:
        return {}
    phases = scaled_phases(script.hyperparameters | options, steps)
    phases = {name: change for name, change in phases.items() if name not in chosen}
    if phases:
        changes = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in phases.items())
        notes.append(f"schedule: {changes} (in proportion to the steps)")
    return {"train_steps": steps, **{name: new for name, (_, new) in phases.items()}}


def _micro_batch(script, options, chosen, device_batch, world_size, notes):
    """The micro batch that is asked for, else one with which a step divides among all ranks."""
    if device_batch not in (None, AUTO):
        return {"micro_batch_size": device_batch}
    sizes = script.hyperparameters | options | chosen
    fitting = "micro_batch_size" not in chosen and fitting_micro_batch(sizes, world_size)
    if not fitting:
        return {}
    if device_batch is None:
        notes.append(f"micro_batch_size: {fitting} (so that a step divides among all ranks)")
    return {"micro_batch_size": fitting}


def _note_run(plan, is_own):
    """Notes what runs. is_own: whether it is as the scale has it."""
    milestone, values = plan.script.milestone, plan.hyperparameters
    if values.get("train_steps"):
        kept = is_own and plan.scale == "tiny" and plan.data == BUILTIN
        plan.notes.append(f"run: {milestone.name if milestone else plan.script.name}, "
                          f"{values['train_steps']:,} steps on "
                          f"{short(plan.data) if plan.data else 'your files'}"
                          + (_kept_run(milestone) if kept else ""))
    if os.environ.get("PYTHONOPTIMIZE"):
        plan.notes.append(
            "PYTHONOPTIMIZE: the ranks run without it, as it skips a script's own checks")


def _check_files(plan, check_here):
    """Checks the files that the run reads, apart from a corpus that is made when it is needed."""
    values, milestone = plan.hyperparameters, plan.script.milestone
    for name in ("train_file", "val_file"):
        if values.get(name) and (plan.data != BUILTIN or Path(values[name]).exists()):
            conversations.check(values[name])
            conversations.check_answers(values[name], values)
    check_here(preflight.check_prefixes, values)
    if plan.data == BUILTIN and not has_shards(BUILTIN):
        return
    served = check_here(
        preflight.check_shards, values, milestone.read_ratio if milestone else 1.0)
    needed = values.get("train_steps")
    if served is not None and needed is not None and served < needed:
        plan.notes.append(f"training shards: they serve {served:,} of {needed:,} steps, then start"
                          " over")


def _kept_run(milestone):
    """What came of the milestone's own tiny run, and how close this one should come, which depends
    on the text; "" if none is kept."""
    with suppress(OSError, ValueError, KeyError, AttributeError):
        for line in (REPOSITORY / TINY_RUNS).read_text(encoding="utf-8").splitlines():
            kept = json.loads(line)
            if kept["milestone"] == milestone.slug:
                here = fingerprint(BUILTIN)  # None before the first run
                close = ("and this one should, but for rounding" if here == kept["corpus"]
                         else f"but {'this' if here else 'another'} Python's text is another:"
                         f" expect +-{OTHER_TEXT}")
                return (f"; {TINY_RUNS} has this run: {kept['seconds'][-1][1]:.0f} s, it ended at"
                        f" val_loss {kept['val_curve'][-1][1]:.4f}, {close}")
    return ""


def name_and_value(setting: str, script: Script) -> tuple[str, str]:
    """The two parts of a "name=value". Raises UserError, exit code 2, for a text that is none, for
    a hyperparameter that the script does not have, and for a value of another type."""
    name, equals, value = setting.removeprefix("--").partition("=")
    if not (name and equals):
        raise UserError(f"--set {setting}: write it as --set name=value", 2)
    if name == "log_dir":
        raise UserError(f"--set {setting}: the log's folder is chosen with --out", 2)
    if name not in script.hyperparameters:
        near = nearest(name, script.hyperparameters)
        hint = f"; did you mean {near}?" if near else ""
        raise UserError(
            f"--set {setting}: {short(script.path)} has no hyperparameter {name}{hint}", 2)
    script.typed(name, value)
    entry = load_glossary().get(name)
    if entry and entry.kind == "text" and not _is_text(value):
        raise UserError(f"--set {name}: it holds bytes that are not UTF-8; give it as text", 2)
    return name, value


def _is_text(value):
    """Whether a word of the command line was UTF-8; Python keeps other bytes as surrogates."""
    try:
        value.encode()
        return True
    except UnicodeEncodeError:
        return False


def _start_of(script, start, settings):
    """The checkpoint from which the run starts; None for a script that starts from nothing."""
    if "checkpoint" not in script.hyperparameters:
        if start is not None:
            raise UserError(f"--from {start}: {short(script.path)} starts from nothing; leave it"
                            " out", 2)
        return None
    if start is None and not settings.get("checkpoint"):
        milestone = script.milestone or script.tiny_of
        root = load_manifest().lineage(milestone)[-1]
        maker = MAKE_ONE.format(root.borrows.lender if root.borrows else "ID")
        if script.generates:
            tuned = [m.id for m in load_manifest().milestones
                     if m.chain == milestone.chain and m.program != milestone.program]
            maker = f"python tools/run_milestone.py {tuned[-1]} --from RUN"
        name = script.milestone.id if script.milestone else script.name
        raise UserError(f"{name} starts from a trained model: add --from RUN, a run's folder; this"
                        f" makes one: {maker}", 2)
    return find_checkpoint(start or Path(settings["checkpoint"]))


def _choose_data(script, scale, data, settings):
    """The folder that the run reads, None where settings name the files, and the hyperparameters
    that name the files in it."""
    if "train_file" in script.hyperparameters:
        names, usual, files_in = ("train_file", "val_file"), BUILTIN, conversations.files_in
    elif "checkpoint" in script.hyperparameters:
        if data is not None:
            raise UserError(f"--data {data}: {short(script.path)} reads no data; leave it out", 2)
        return None, {}
    else:
        names, files_in = ("train_files", "val_files"), patterns
        usual = FINEWEB if scale == "record" else BUILTIN
    if {*names} <= settings.keys():
        return None, {}
    return data or usual, files_in(data or usual)


def choose_scale(
    scale: str | None, data: Path | None, gpus: list[str], start: Path | None = None,
    capability: tuple[int, int] | None = None, fault: str | None = None,
) -> tuple[str, str]:
    """The scale and the reason for it, from the user's choices (None: no choice), the visible GPUs
    that torch can use, the checkpoint from which the run starts, the GPUs' least compute capability
    (None: not known), and why torch cannot use GPUs that are there."""
    if scale is not None:
        return scale, ASKED
    if start is not None and (found := scale_of(start)):
        return found, f"that of {short(start.parent)}, from which it starts"
    if not gpus:
        return "tiny", f"{fault or 'nvidia-smi shows no GPU here'}; --scale record overrides this"
    if capability and capability < BFLOAT16:
        return "tiny", (f"{gpus[0]} has no bfloat16 tensor cores, without which the record's sizes"
                        " take days; --scale record overrides this")
    folder = data or FINEWEB
    if not has_shards(folder):
        return "tiny", f"no shards in {short(folder)}; fetch them: {fetch_command(folder)}"
    return "record", f"{len(gpus)} x {gpus[0]}, shards in {short(folder)}"


def fresh_out(name: str) -> Path:
    """A folder below runs/ that does not exist yet, called `name` and the time."""
    first = REPOSITORY / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(out for out in itertools.chain([first], others) if not out.exists())


def make_fresh_out(name: str) -> Path:
    """Makes such a folder, only for this run; OSError if that is impossible."""
    while True:
        out = fresh_out(name)
        try:
            out.mkdir(parents=True)
            return out
        except FileExistsError:
            if not out.is_dir():  # the folder above is no folder; else another run took the name
                raise


def check_out(out: Path, nodes: Nodes) -> None:
    """Raises UserError if `out` holds a run already, or can hold none."""
    for name in (nodes.ranks, *(("log.txt", SCRIPT, CHECKPOINT) if nodes.rank == 0 else ())):
        if (out / name).exists():
            raise UserError(f"--out {out} holds a run already ({name}); choose another folder")
    existing = next(it for it in (out, *out.absolute().parents) if os.path.lexists(it))
    if not existing.is_dir():
        what = "not a folder" if existing.exists() else "a broken link"
        raise UserError(f"--out {out}: {existing} is {what}; choose another name")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--out {out}: cannot write in {existing}")
