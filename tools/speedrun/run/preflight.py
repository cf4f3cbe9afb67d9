"""Refuses a run that cannot succeed, in one line and before anything is started or written.

A script itself only asserts what would otherwise train wrongly; all other errors are found here. A
rule on a hyperparameter that a script does not have is skipped, so that any script can be launched.
"""

import glob
import math
import operator
import os
import shlex
from array import array
from itertools import islice
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.history.glossary import Hyperparameter, load_glossary
from speedrun.history.manifest import REPOSITORY
from speedrun.history.tokens import stages, step_tokens
from speedrun.run.data import (
    HEADER_BYTES,
    fetch_command,
    folder_of,
    shard_length,
    shards_read,
    steps_by_shard,
)
from speedrun.run.gpus import BFLOAT16, FLOAT8
from speedrun.scripts.sizes import length_names, longest_dense, micro_batches

# How two hyperparameters fit together: the glossary's key, the type of the first (the other is an
# int), the rule, and words if it is broken.
PAIRS = {
    "divides": (int, lambda heads, dim: dim % heads == 0,
                "{b}={other} is not a multiple of {a}={one}; change one of them"),
    "below": (int, operator.lt, "{a}={one} is not below {b}={other}; change one of them"),
    "at_most": (int, operator.le, "{a}={one} is above {b}={other}; change one of them"),
    "letters": (str, lambda pattern, layers: len(pattern) == layers,
                "{a}={one} does not have a letter for each of {b}={other}; change one of them"),
}
MOST_RANKS = 64  # that a message lists as fitting


class NotHere(UserError):
    """Something is missing on this machine that another may have."""


def check_gpus(
    nproc: int | None, gpus: list[str], needed: bool, fault: str | None = None
) -> None:
    """Raises NotHere for more ranks than visible GPUs, or if one is needed and torch can use none;
    fault: why it cannot use those that are there."""
    if gpus and (nproc or 0) > len(gpus):
        raise NotHere(f"--nproc {nproc}: this machine shows {len(gpus)} GPU(s), one per rank")
    if needed and not gpus:
        raise NotHere(f"{fault or 'nvidia-smi shows no GPU'}, and the record's sizes need one")


def check_values(
    values: dict[str, object], defaults: dict[str, object], world_size: int, on_gpu: bool,
    capability: tuple[int, int] | None = None,
) -> None:
    """Raises UserError for hyperparameters that are out of range or do not fit together.

    values: {name: value}, in the script's own types; defaults: the script's; None is not known. No
    range begins above the default, which is right by definition. world_size: ranks on all
    machines; on_gpu: whether they have GPUs; capability: the least compute capability of these,
    None if it is not known: then they can do everything.
    """
    glossary = load_glossary()
    for name, value in values.items():
        if type(value) in (int, float):
            kind = "factor" if isinstance(value, float) else "count"
            entry, default = glossary.get(name) or Hyperparameter("", kind), defaults.get(name)
            known = default if type(default) in (int, float) else None
            if fault := entry.range_fault(value, known):
                raise UserError(f"{name}={value} is out of range; give {fault}")
            if type(value) is int and value >= 2**63:  # no tensor, no generator takes it
                raise UserError(f"{name}={value} is out of range; give a number below 2**63")
    for key, (kind, fit, words) in PAIRS.items():
        for a, b in glossary.column(key).items():
            known = type(values.get(a)) is kind and _known(values, b)
            if known and not fit(values[a], values[b]):
                raise UserError(words.format(a=a, one=values[a], b=b, other=values[b]))
    for name, alphabet in glossary.column("alphabet").items():
        pattern, layers = values.get(name), values.get("num_layers")
        if type(pattern) is not str:
            continue
        if type(layers) is int and len(pattern) < layers:
            raise UserError(f"{name}={pattern} has fewer letters than num_layers={layers}; change"
                            " one of them")
        default = defaults.get(name) or alphabet  # a script knows its own letters, and digits
        alphabet = "".join(c for c in alphabet if c in default or c.isdigit())
        if foreign := "".join(dict.fromkeys(c for c in pattern if c not in alphabet)):
            raise UserError(f"{name}={pattern} holds {foreign}; its letters are {alphabet}")
    for name, length in zip(("total_batch_size", "val_tokens"), length_names(values), strict=True):
        sizes = values.get("micro_batch_size"), values.get(length), world_size
        if _known(values, name, "micro_batch_size", length) and values[name] % math.prod(sizes):
            raise UserError(f"{name}={values[name]} is not a multiple of micro_batch_size *"
                            f" {length} * ranks = {' * '.join(map(str, sizes))};"
                            f" {_what_divides(values, world_size)}")
    _check_windows(values)
    _check_attention(values, longest_dense(defaults), on_gpu, capability)
    for name, switch, unit in glossary.multiples():
        has_fp8 = on_gpu and (capability or FLOAT8) >= FLOAT8
        # not known: where it can
        switched_on = on_gpu and values.get(switch, False) in (True, None if has_fp8 else True)
        if switched_on and _known(values, name) and values[name] % unit:
            raise UserError(f"{name}={values[name]} is not a multiple of {unit}, which"
                            f" {glossary[switch].needs} needs; change it, or add"
                            f" --set {switch}=False")


def _what_divides(values, world_size):
    """Advice on how a step and a validation can divide among the ranks."""
    if fitting := micro_batches(values, world_size):
        return f"micro_batch_size may be {', '.join(map(str, fitting[:MOST_RANKS]))}"
    fitting = [ranks for ranks in range(1, MOST_RANKS + 1) if micro_batches(values, ranks)]
    if fitting:
        return f"the number of ranks may be {', '.join(map(str, fitting))}"
    return "each batch has to be a multiple of its sequences' tokens"


def check_shards(
    values: dict[str, object], read_ratio: float = 1.0, tokens: bool = False
) -> int | None:
    """Raises UserError if train_files or val_files name no shards (NotHere), other files, a shard
    that is not whole or only shards that are too short for a step. Reads only the shards' headers.
    Returns the number of steps that the training shards serve before they start over, or None if
    that is not known.

    values: hyperparameters as for check_values. read_ratio: see Milestone. tokens: whether to read
    every token of the run, too, which takes numpy, and to refuse one beyond vocab_size.
    """
    served, seen = None, set()
    train_steps = max(values.get(name) or 0 for name in load_glossary().of_kind("steps"))
    for name, step, growth, steps in (
            ("train_files", "total_batch_size", stages(values), train_steps),
            ("val_files", "val_tokens", 1, 1)):
        pattern = values.get(name)
        if pattern is None:
            continue
        files = sorted(glob.glob(pattern))
        if both := seen.intersection(map(os.path.realpath, files)):
            raise UserError(f"{short(Path(min(both)))} is in both train_files and val_files;"
                            " validate on text that the model does not train on")
        seen |= set(map(os.path.realpath, files))
        if not files:
            needed = _known(values, "train_steps", "total_batch_size") and shards_read(
                _read(values, values["train_steps"], read_ratio))
            folder = folder_of(pattern)
            try:
                os.listdir(folder)
            except FileNotFoundError:
                existing = next(it for it in (folder, *folder.absolute().parents)
                                if os.path.lexists(it))
                if not existing.exists():  # a disk that is not mounted, say
                    raise NotHere(f"{name}={pattern}: {existing} is a broken link to"
                                  f" {os.readlink(existing)}; make that reachable, or remove the"
                                  " link") from None
            except OSError as error:
                raise UserError(f"{name}={pattern}: {folder} cannot be read as a folder:"
                                f" {error.strerror}; change its permissions or choose another"
                                ) from None
            raise NotHere(f"no shards match {name}={pattern}; get some:"
                          f" {fetch_command(folder, needed or None)}")
        lengths = {file: shard_length(file) for file in files}
        if not _known(values, step):
            continue
        longest, most = max(lengths.values()), growth * values[step]
        if longest <= most:
            grown = f", which grows to {most}," if growth > 1 else ""
            raise UserError(f"{step}={values[step]}{grown} and one token more do not fit into the"
                            f" longest shard of {pattern}, which holds {longest}; lower {step}")
        if name == "train_files":
            read = _read(values, steps, read_ratio)
            served = sum(map(len, steps_by_shard(read, lengths.values())))
        if tokens and _known(values, "vocab_size"):
            trained = _read(values, steps) if name == "train_files" else [values[step]]
            _check_tokens(lengths, trained, values["vocab_size"])
    return served


def check_prefixes(values: dict[str, object]) -> None:
    """Raises NotHere if prefix_file is missing, and UserError if it is not what data/prefixes.py
    writes: the id of a prefix, or -1, for each of at most vocab_size tokens."""
    file = values.get("prefix_file")
    if file in (None, "none"):
        return
    make = f"python {short(REPOSITORY / 'data' / 'prefixes.py')}"
    if not os.path.exists(file):
        raise NotHere(f"prefix_file={file} is missing; make it: {make} --out {shlex.quote(file)}")
    ids = array("i")
    if Path(file).is_file() and os.path.getsize(file) % ids.itemsize == 0:
        ids.frombytes(Path(file).read_bytes())
    most = values["vocab_size"]
    if not 0 < len(ids) <= most or min(ids) < -1 or max(ids) >= len(ids):
        raise UserError(f"prefix_file={file} is not a table of the prefixes of at most"
                        f" vocab_size={most} tokens; {make} makes GPT-2's, of 50,257;"
                        " prefix_file=none does without")


def _read(values, steps, ratio=1.0):
    """The tokens that each of so many steps takes from the shards."""
    return (round(tokens * ratio) for tokens in islice(step_tokens(values), steps))


def _check_tokens(lengths, steps, vocab_size):
    """Refuses a token beyond the vocabulary among those that steps of so many tokens read from the
    shards {file: tokens}."""
    import numpy as np  # a dry run does without

    for file, served in zip(lengths, steps_by_shard(steps, lengths.values()), strict=True):
        if served:
            count = sum(served) + 1
            tokens = np.memmap(file, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))
            if tokens.max() >= vocab_size:
                raise UserError(f"{file} holds token {tokens.max()}, beyond"
                                f" vocab_size={vocab_size}; it is of another vocabulary")


def _known(values, *names):
    """Whether all of these hyperparameters are there, as whole numbers."""
    return all(type(values.get(name)) is int for name in names)


def _check_windows(values):
    """The rule for windows that grow by stages, and once more for the last validation."""
    if not _known(values, "window_start", "window_growth", "window_end"):
        return
    count = values.get("window_stages", stages(values))
    last = values["window_start"] + (count - 1) * values["window_growth"]
    # If long windows have an end of their own, window_end marks the last validation.
    if values["window_end"] < last + ("long_window_end" in values):
        raise UserError(f"window_end={values['window_end']} is too small, as the last of"
                        f" {count} stages trains with a window of {last}; raise it, or lower"
                        " window_start or window_growth")


def _check_attention(values, longest, on_gpu, capability):
    """Rules for a script with FlexAttention or a choice of kernels. A default that is not known is
    what the machine can do, as the script itself chooses."""
    here = {name: on_gpu if value is None else value for name, value in values.items()}
    without_mask = {}  # attention without a dense mask -> whether the run takes it
    if "use_flex_attention" in values:
        flex = here["use_flex_attention"]
        if flex and not on_gpu:
            raise UserError("use_flex_attention=True: FlexAttention has no backward pass without"
                            " CUDA; leave it out")
        without_mask["a compiled FlexAttention"] = flex and here.get("compile", True)
    if "attention_kernel" in values:
        has_flash = on_gpu and (capability or BFLOAT16) >= BFLOAT16
        kernel = values["attention_kernel"] or ("FA2" if has_flash else "dense")
        if kernel != "dense" and not on_gpu:
            raise UserError(f"attention_kernel={kernel}: without CUDA only dense trains; leave it"
                            " out")
        if kernel != "dense" and not has_flash:
            raise UserError(f"attention_kernel={kernel}: FlashAttention needs compute capability"
                            f" 8.0, and this GPU has {'.'.join(map(str, capability))}; leave it"
                            " out")
        if kernel != "dense" and values.get("bf16") is False:
            raise UserError(f"bf16=False does not fit attention_kernel={kernel}, which takes only"
                            " bfloat16; leave it out, or add --set attention_kernel=dense")
        without_mask["FlashAttention"] = kernel != "dense"
    for name, growth in zip(length_names(values), (stages(values), 1), strict=True):
        for path, taken in without_mask.items():
            most = longest // growth  # sequences grow with the batch
            if not taken and _known(values, name) and values[name] > most:
                if on_gpu and (capability or BFLOAT16) < BFLOAT16:
                    raise UserError(f"{name}={values[name]} is too long for a dense mask; a GPU"
                                    " below compute capability 8.0 is fit for the tiny scale only"
                                    " (run_milestone.py --scale tiny)")
                raise UserError(f"{name}={values[name]} is too long for a dense mask, which only"
                                f" {path} does without; lower it to {most} or less")
