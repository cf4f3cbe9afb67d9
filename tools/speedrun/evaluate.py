"""How good a trained model is: its loss per token and per byte, and how often it finds the right
one of four endings."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from speedrun.base.errors import UserError
from speedrun.base.files import replace_file
from speedrun.base.text import short
from speedrun.history.glossary import load_glossary
from speedrun.history.manifest import REPOSITORY
from speedrun.run import conversations
from speedrun.run.data import (
    BUILTIN,
    FINEWEB,
    HEADER_BYTES,
    fetch_command,
    make_builtin,
    shard_length,
    shards_in,
)
from speedrun.sample import Trained, Vocabulary
from speedrun.scripts.sizes import length_names

HELLASWAG = REPOSITORY / "data" / "hellaswag" / "hellaswag_val.jsonl"
CHAT = BUILTIN / "chat_val.jsonl"
ENDINGS = 4  # of each item
IGNORED = -100  # the target of a token that is not scored


@dataclass(frozen=True)
class Item:
    """A context, ENDINGS texts that may follow it, and the index of the right one."""

    context: str
    endings: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class Accuracy:
    """How often the right ending had the largest log-probability: the sum over its tokens (acc), or
    that sum per byte (acc_norm), which does not favour short endings; each with its standard error
    over n items."""

    n: int
    acc: float
    acc_norm: float

    @property
    def acc_se(self) -> float:
        """Standard error of acc."""
        return standard_error(self.acc, self.n)

    @property
    def acc_norm_se(self) -> float:
        """Standard error of acc_norm."""
        return standard_error(self.acc_norm, self.n)


def standard_error(part: float, n: int) -> float:
    """Of a part that was counted in n independent items."""
    return math.sqrt(part * (1 - part) / max(n - 1, 1))


# ---- tasks ----


def hellaswag_items(file: Path) -> Iterator[Item]:
    """Yields the items of HellaSwag's own JSONL, a line at a time.

    The context is the activity and what happens in it; both lose their marks such as [title].
    Raises UserError, `file:line: what is wrong`, for the first line that is no item, and where the
    file cannot be read or is empty.
    """
    items = 0
    try:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    items += 1
                    try:
                        yield _hellaswag_item(line)
                    except ValueError as error:
                        raise UserError(f"{file}:{number}: {error}") from None
    except FileNotFoundError:
        raise UserError(f"there is no file {short(file)}; fetch it: python data/hellaswag.py, or"
                        " name another with --data FILE") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    if not items:
        raise UserError(f"{file} is empty; fetch it again: python data/hellaswag.py")


def _hellaswag_item(line):
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if type(found) is not dict:
        raise ValueError("not a JSON object")
    for key in ("activity_label", "ctx_a", "ctx_b"):
        if type(found.get(key)) is not str:
            raise ValueError(f'no text "{key}"')
    endings, label = found.get("endings"), found.get("label")
    if type(endings) is not list or len(endings) != ENDINGS or not all(
            type(ending) is str and ending.strip() for ending in endings):
        raise ValueError(f'"endings" is not a list of {ENDINGS} texts')
    if not str(label).isdecimal() or not int(label) < ENDINGS:  # its test split has no labels
        raise ValueError(f'"label" is {label!r}, not a number from 0 to {ENDINGS - 1}')
    happens = f"{found['ctx_a']} {found['ctx_b'].capitalize()}"
    context = _without_marks(f"{found['activity_label']}: {happens}")
    return Item(context, tuple(" " + _without_marks(ending) for ending in endings), int(label))


def _without_marks(text):
    """A title's mark ends a sentence; other marks in brackets are dropped, and double spaces."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return re.sub(" {2,}", " ", text).strip()


def docstring_items(file: Path = CHAT) -> Iterator[Item]:
    """Yields, for each function of the embedded validation conversations, its source and four first
    lines of docstrings: its own, and those of three other functions. Makes the file if needed."""
    if file == CHAT and not file.exists():
        conversations.make_builtin()
    conversations.check(file)
    with open(file, encoding="utf-8") as lines:
        talks = [json.loads(line)["messages"] for line in lines if line.strip()]
    pairs = [(talk[-2]["content"], talk[-1]["content"]) for talk in talks]
    answers = list(dict.fromkeys(answer for _, answer in pairs))
    if len(answers) < ENDINGS:
        raise UserError(f"{short(file)} has only {len(answers)} different answers, and an item"
                        f" needs {ENDINGS}")
    for number, (question, answer) in enumerate(pairs):
        random = np.random.default_rng(number)
        others = [other for other in answers if other != answer]
        endings = [others[i] for i in random.choice(len(others), ENDINGS - 1, replace=False)]
        label = int(random.integers(ENDINGS))
        yield Item(question, (*endings[:label], answer, *endings[label:]), label)


def hellaswag_ids(item: Item, trained: Trained, vocabulary: Vocabulary) -> list[int]:
    """The ids of an item's context, as the beginning of a document."""
    start = [] if vocabulary.bos is None else [vocabulary.bos]
    return start + vocabulary.encode(item.context.encode())


def docstring_ids(item: Item, trained: Trained, vocabulary: Vocabulary) -> list[int]:
    """The ids of an item's context: a fine-tuned model is asked as in its conversations, another
    continues the function with a docstring."""
    if trained.markers:
        start, user, assistant, _ = trained.markers
        return [start, user, *vocabulary.encode(item.context.encode()), assistant]
    text = f'{item.context}\n    """'
    return ([] if vocabulary.bos is None else [vocabulary.bos]) + vocabulary.encode(text.encode())


@dataclass(frozen=True)
class Task:
    """A task's file, its items, and the ids of an item's context."""

    file: Path
    items: Callable[[Path], Iterator[Item]]
    context_ids: Callable[[Item, Trained, Vocabulary], list[int]]


TASKS = {
    "docstring": Task(CHAT, docstring_items, docstring_ids),
    "hellaswag": Task(HELLASWAG, hellaswag_items, hellaswag_ids),
}


# ---- scores ----


@torch.inference_mode()
def log_probabilities(trained: Trained, pairs: list[tuple[list[int], list[int]]]) -> list[float]:
    """The summed log-probability in nats of each ending after its context, pairs of ids.

    The model sees as much of what comes before a token as fits its context. An ending that is
    longer than that is scored in parts of half of it, each with what fits before it.
    """
    parts, whose = [], []
    for number, (context, ending) in enumerate(pairs):
        size = len(ending) if len(ending) <= trained.context else max(1, trained.context // 2)
        for start in range(0, len(ending), size):
            parts.append((context + ending[:start], ending[start : start + size]))
            whose.append(number)
    sums = [0.0] * len(pairs)
    for start in range(0, len(parts), len(pairs)):
        some = _log_probabilities(trained, parts[start : start + len(pairs)])
        for number, part in zip(whose[start : start + len(pairs)], some, strict=True):
            sums[number] += part
    return sums


def _log_probabilities(trained, pairs):
    """The same for endings of at most a context, in one batch; what is longer than the context is
    cut from the left."""
    rows = [(context + ending)[-trained.context - 1 :] for context, ending in pairs]
    shape = len(rows), max(map(len, rows)) - 1
    inputs, targets = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
    for number, (row, (_, ending)) in enumerate(zip(rows, pairs, strict=True)):
        inputs[number, : len(row) - 1] = torch.tensor(row[:-1])
        scored = min(len(ending), len(row) - 1)
        targets[number, len(row) - 1 - scored : len(row) - 1] = torch.tensor(row[-scored:])
    logits = trained.model(inputs.to(trained.device)).float().cpu()  # (B, T, V)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (-losses.view(shape).double().sum(1)).tolist()


def answer_task(
    trained: Trained, vocabulary: Vocabulary, task: str, file: Path, results: Path,
    checkpoint: str, *, batch: int, limit: int | None = None,
    show: Callable[[int], object] = lambda count: None,
) -> Accuracy:
    """The Accuracy of a model in a task.

    file: of the task's items, read a batch at a time; results: a file that gets a line per item as
    soon as it is scored, and from which an interrupted evaluation of the same model and items goes
    on; checkpoint: a hash of the model's file; batch: items scored at once; limit: of items, the
    first ones; show: gets the number of items that are done. Raises UserError, one line, for a file
    that does not serve, before any item is scored.
    """
    known = TASKS[task]
    for _ in known.items(file):  # a fault in its last line should not show after an hour
        pass
    head = dict(task=task, items=file_hash(file), checkpoint=checkpoint, context=trained.context,
                long_endings="in parts")
    earlier = _earlier(results, head, known.items(file))
    replace_file(results, "".join(json.dumps(line) + "\n" for line in [head, *earlier]).encode())
    items, n, right, right_norm = itertools.islice(known.items(file), limit), 0, 0, 0
    with open(results, "a", encoding="utf-8") as out:
        while some := list(itertools.islice(items, batch)):
            scored = earlier[n : n + len(some)]
            new = some[len(scored) :]
            pairs = [(context, vocabulary.encode(ending.encode())) for item in new
                     for context in [known.context_ids(item, trained, vocabulary)]
                     for ending in item.endings]
            sums = iter(log_probabilities(trained, pairs) if pairs else [])
            for item in new:
                scored.append([next(sums) for _ in item.endings])
                if not np.isfinite(scored[-1]).all():
                    raise UserError("the model's logits are not finite; its training has diverged")
                out.write(json.dumps(scored[-1]) + "\n")
            out.flush()
            n += len(some)
            right += sum(picks_right(item, sums) for item, sums in zip(some, scored, strict=True))
            right_norm += sum(picks_right(item, sums, per_byte=True)
                              for item, sums in zip(some, scored, strict=True))
            show(n)
    return Accuracy(n, right / n, right_norm / n)


def picks_right(item: Item, sums: list[float], per_byte: bool = False) -> bool:
    """Whether the right ending has the largest of the endings' log-probabilities."""
    lengths = [len(ending.strip().encode()) if per_byte else 1 for ending in item.endings]
    return int(np.argmax(np.divide(sums, lengths))) == item.label


def _earlier(results, head, items):
    """The scores in a file of results, up to a line that was cut short or is damaged; none if the
    file is of another model or other items."""
    try:
        first, *lines = results.read_text(encoding="utf-8").split("\n")
        if json.loads(first) != head:
            return []
    except (OSError, ValueError, RecursionError):
        return []
    whole = []
    for line, item in zip(lines, items, strict=False):
        try:
            sums = [float(number) for number in json.loads(line)]
        except (TypeError, ValueError, RecursionError):
            break
        if len(sums) != len(item.endings):
            break
        whole.append(sums)
    return whole


def file_hash(file: Path) -> str:
    """16 hex digits of a file's SHA-256; OSError if it cannot be read."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


# ---- loss ----


@torch.inference_mode()
def val_loss(
    trained: Trained, vocabulary: Vocabulary, *, data: Path | None = None,
    tokens: int | None = None, batch: int, show: Callable[[int], object] = lambda count: None,
) -> tuple[float, float]:
    """The mean loss of a model on validation text, in nats per token and in bits per byte; a
    document's start counts as a token and has no byte.

    data: folder of the shards (None: the embedded corpus for bytes, FineWeb for GPT-2's tokens);
    tokens: their number (None: that of the run's own validations); they are cut into sequences of
    the validations' length, at most the model's context. batch: sequences per forward pass; show:
    gets the number of tokens read.
    Raises UserError, one line, if there are no such shards or they are of another vocabulary.
    """
    data = data or (BUILTIN if vocabulary.name == "bytes" else FINEWEB)
    if data.resolve() == BUILTIN:
        make_builtin()
    file = min(shards_in(data, "val"), default=None)
    if file is None:
        raise UserError(f"no validation shard in {short(data)}; get one: {fetch_command(data)}")
    T = min(getattr(trained.args, length_names(vars(trained.args))[1]), trained.context)
    length = shard_length(file)
    if tokens and tokens >= length:  # the last token is only a target
        raise UserError(f"{short(file)} has {length:,} tokens; --val-tokens may be at most"
                        f" {length - 1:,}")
    own = trained.handles.val_tokens(trained.args)
    tokens = tokens or own or load_glossary()["val_tokens"].tiny
    rows = min(tokens, length - 1) // T
    if not rows:
        raise UserError(f"{short(file)} and {tokens:,} tokens of it hold no sequence of {T}")
    shard = np.memmap(file, dtype="<u2", mode="r", offset=HEADER_BYTES)[: rows * T + 1]
    if shard.max() >= trained.args.vocab_size:
        raise UserError(f"{short(file)} holds token {shard.max()}, beyond the model's vocabulary of"
                        f" {trained.args.vocab_size}; choose other shards")
    nats = 0.0
    for row in range(0, rows, batch):
        show(row * T)
        count = min(batch, rows - row)
        ids = torch.from_numpy(shard[row * T : (row + count) * T + 1].astype(np.int64))
        inputs = ids[:-1].view(count, T).to(trained.device)
        logits = trained.model(inputs).float()
        nats += F.cross_entropy(logits.flatten(0, 1), ids[1:].to(trained.device),
                                reduction="sum").item()
    show(rows * T)
    ids, counts = np.unique(shard[1:], return_counts=True)
    size = sum(len(vocabulary.bytes_of(int(id))) * int(count)
               for id, count in zip(ids, counts, strict=True) if id != vocabulary.bos)
    return nats / (rows * T), nats / math.log(2) / size
