"""The files of conversations that fine-tuning reads: one JSON object a line,

    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}

Users and assistants take turns, from a user to an assistant; one system message may come first.
Blank lines are skipped, and so are other keys.
"""

import glob
import hashlib
import json
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.history.manifest import REPOSITORY
from speedrun.run.data import BUILTIN, DOCUMENT_START, fill

SCRIPT = REPOSITORY / "data" / "builtin_chat.py"
SPLITS = ("train", "val")
TURNS = ("user", "assistant")


def files_in(folder: Path) -> dict[str, str]:
    """The hyperparameters train_file and val_file for a folder that holds one *_train.jsonl and one
    *_val.jsonl. Raises UserError where it does not; the embedded files may still be missing."""
    if folder.resolve() == BUILTIN:
        return {f"{split}_file": short(BUILTIN / f"chat_{split}.jsonl") for split in SPLITS}
    files = {split: [Path(file) for file in sorted(glob.glob(  # as the shell, no dot files
        f"{glob.escape(str(folder))}/*_{split}.jsonl"))] for split in SPLITS}
    for split, found in files.items():
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise UserError(f"{short(folder)} must hold one file *_{split}.jsonl, not {names}; or"
                            f" name it: --set {split}_file=FILE")
    return {f"{split}_file": short(file) for split, (file,) in files.items()}


def make_builtin() -> None:
    """Makes the embedded conversations if they are not there. Raises UserError if that fails."""
    fill(BUILTIN, SCRIPT.name)


def fingerprint(*files: str | Path) -> str:
    """16 hex digits of the files' SHA-256, as data/builtin_chat.py computes it of the training file
    and the validation file. Raises OSError if one cannot be read."""
    content = hashlib.sha256()
    for file in files:
        content.update(Path(file).read_bytes())
    return content.hexdigest()[:16]


def check(file: str | Path) -> int:
    """The number of conversations in a file. Raises UserError, `file:line: what is wrong`, for the
    first line that is no conversation, and where there is no such file or no conversation."""
    count = 0
    try:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    count += _is_conversation(line)
                except ValueError as error:
                    raise UserError(f"{file}:{number}: {error}") from None
    except FileNotFoundError:
        raise UserError(f"there is no file {file}; make one: python {short(SCRIPT)}") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    if not count:
        raise UserError(f"{file} holds no conversation")
    return count


def check_answers(file: str | Path, values: dict[str, object]) -> None:
    """Raises UserError if no conversation of a file, which `check` has read, has an answer that
    begins within seq_len tokens: the script would drop all of them.

    values: hyperparameters, {name: value}. Does nothing where GPT-2's vocabulary is not there."""
    bos_id, seq_len = values.get("bos_id"), values.get("seq_len")
    if type(bos_id) is not int or type(seq_len) is not int:
        return
    room, count, longer = seq_len - 3, 0, []  # start, user and assistant come before the answer
    with open(file, encoding="utf-8", newline="\n") as lines:
        for line in filter(str.strip, lines):
            messages = json.loads(line)["messages"]
            first = [message["role"] for message in messages].index("assistant")
            asked = "\n\n".join(message["content"] for message in messages[:first])
            if len(asked.encode()) <= room:  # no text has more tokens than bytes
                return
            count, longer = count + 1, [*longer, asked] if bos_id != DOCUMENT_START else []
    if longer:
        try:
            import tiktoken

            gpt2 = tiktoken.get_encoding("gpt2")
        except (ImportError, OSError, ValueError):
            return
        if any(len(gpt2.encode_ordinary(asked)) <= room for asked in longer):
            return
    raise UserError(f"{file}: all {count:,} conversations would be dropped: no answer begins within"
                    f" seq_len={seq_len} tokens; raise it, or shorten the questions")


def _is_conversation(line):
    """Whether a line is a conversation, not blank; ValueError for a line that is neither."""
    try:
        line = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    if not line:
        return False
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        raise ValueError(f"not JSON: {reason} (column {getattr(error, 'colno', 1)})") from None
    messages = found.get("messages") if type(found) is dict else None
    if type(messages) is not list or not messages:
        raise ValueError('each line must be an object whose "messages" are a list of at least one')
    for number, message in enumerate(messages, start=1):
        if type(message) is not dict or type(message.get("content")) is not str:
            raise ValueError(f'message {number} has no text as its "content"')
        if message.get("role") not in ("system", *TURNS):
            raise ValueError(f"message {number} has the role {message.get('role')!r}; it must be"
                             " system, user or assistant")
        if not _is_text(message["content"]):
            raise ValueError(f"message {number} holds half of a surrogate pair, which is no text")
    roles = [message["role"] for message in messages]
    first = roles[0] == "system"
    for number, role in enumerate(roles[first:]):
        if role != TURNS[number % 2]:
            raise ValueError(f"message {number + first + 1} is of the {role}; here it is the"
                             f" {TURNS[number % 2]}'s turn")
    if roles[-1] != "assistant":
        raise ValueError(f"the last message is of the {roles[-1]}, not of the assistant")
    return True


def _is_text(content):
    try:
        content.encode()
    except UnicodeEncodeError:
        return False
    return True
