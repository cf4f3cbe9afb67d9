"""Makes small conversations without a download: functions of Python's standard library, and what
their docstrings say that they do.

    python data/builtin_chat.py               # -> data/builtin/chat_train.jsonl, chat_val.jsonl
    python data/builtin_chat.py --out DIR

A line is one conversation: the user shows a function without its docstring, the assistant answers
with the docstring's first line. A file is on the same side, train or val, as in builtin_corpus.py,
so a model that was trained on that corpus has not seen the functions of val. They depend on the
Python version: compare losses only between runs with one fingerprint.
"""

import ast
import json
import platform
import re
import sys
import sysconfig
import textwrap
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
import shards
from builtin_corpus import main, sha256, source_files, val_paths

TRAIN, VAL = FILES = "chat_train.jsonl", "chat_val.jsonl"
LONGEST_QUESTION = 160  # UTF-8 bytes
ANSWER = re.compile(r"[A-Za-z].*\s")  # begins with a letter, and has more than one word


def pairs(source):
    """Returns the (question, answer) of each function of a file (bytes), in the order of lines.

    The question is the function's source without decorators and docstring, or its lines before the
    docstring where all of it is too long; the answer is the docstring's first line. Functions
    without a question or an answer are left out, and so is a file that is not Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in strings
            tree = ast.parse(source)
        lines = source.decode("utf-8").split("\n")
    except (SyntaxError, ValueError):
        return []
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    functions = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    found = (_pair(node, lines) for node in sorted(functions, key=lambda node: node.lineno))
    return [pair for pair in found if pair]


def _pair(function, lines):
    """The (question, answer) of a function, or None."""
    text = ast.get_docstring(function)
    answer = text.split("\n")[0].strip() if text else ""
    if not ANSWER.match(answer):
        return None
    docstring = function.body[0]
    first, last = docstring.lineno - 1, docstring.end_lineno
    before = lines[first].encode()[: docstring.col_offset]
    after = lines[last - 1].encode()[docstring.end_col_offset :]
    if before.strip() or after.strip():  # other code shares its lines
        return None
    signature, body = lines[function.lineno - 1 : first], lines[last : function.end_lineno]
    for part in (signature + body, signature):
        question = textwrap.dedent("\n".join(part)).strip()
        if len(question.encode()) <= LONGEST_QUESTION:
            return question, answer
    return None


def conversations(files):
    """Returns the pairs (train, val) of the files {path: bytes}: each pair once, none on both
    sides."""
    of_val, train, val = val_paths(files), {}, {}
    for path in sorted(files):
        side = val if path in of_val else train
        side.update(dict.fromkeys(pairs(files[path])))
    return [pair for pair in train if pair not in val], list(val)


def to_line(pair):
    """Returns the line of a file for a pair, as bytes."""
    messages = [dict(role=role, content=content)
                for role, content in zip(("user", "assistant"), pair, strict=True)]
    return json.dumps({"messages": messages}).encode() + b"\n"


def fingerprint(out_dir):
    """Returns the first 16 hex digits of the files' sha256; raises OSError if one is missing."""
    return sha256(b"".join((out_dir / name).read_bytes() for name in FILES))[:16]


def existing(out_dir):
    """Returns the fingerprint of the conversations in out_dir made by this Python, else None."""
    try:
        made = json.loads((out_dir / "chat.json").read_text(encoding="utf-8"))
        found = {"python": platform.python_version(), "fingerprint": fingerprint(out_dir)}
    except (OSError, ValueError):
        return None
    return found["fingerprint"] if made == found else None


def build(out_dir):
    """Writes the files, then chat.json, which marks them complete.

    Argument: the folder (made if missing). Returns the fingerprint. Raises ValueError if this
    Python has no source of its standard library, OSError if the folder cannot be written.
    """
    sides = conversations(source_files(Path(sysconfig.get_path("stdlib")).resolve()))
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "chat.json").unlink(missing_ok=True)
    for name, side in zip(FILES, sides, strict=True):
        with shards.atomic_file(out_dir / name) as file:
            file.writelines(map(to_line, side))
        print(f"{name:<25}{len(side):>7,} conversations")
    made = {"python": platform.python_version(), "fingerprint": fingerprint(out_dir)}
    with shards.atomic_file(out_dir / "chat.json") as file:
        file.write(json.dumps(made).encode())
    return made["fingerprint"]


if __name__ == "__main__":
    main(__doc__, existing, build)
