#!/usr/bin/env python3
"""Open your own copies of the notebooks, without outputs, in JupyterLab.

    python tools/open_lessons.py

The copies are in my_lessons/. A copy that you have run or edited is yours and is never changed; one
that you have not touched follows its notebook in lessons/.
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, run_command
from speedrun.base.errors import UserError
from speedrun.base.files import read_json, replace_file
from speedrun.history.manifest import REPOSITORY

LESSONS, COPIES = REPOSITORY / "lessons", REPOSITORY / "my_lessons"
MADE_FROM = "made_from"  # the copy's metadata: a hash of the cells that it was made from


def main() -> int:
    """Parses, copies, says what it kept, and becomes JupyterLab."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    import jupyterlab  # noqa: F401  a broken one is named before anything is written

    for name in copy_lessons(LESSONS, COPIES):
        print(f"{name}: your copy is kept, but the lesson is newer; rename yours to get it")
    os.environ["LESSONS_OPENED"] = "1"  # lesson.py: somebody is there to guess and to move sliders
    # On rented GPUs one is often root, which Jupyter otherwise refuses.
    options = ["--allow-root", f"--ServerApp.root_dir={REPOSITORY}",
               f"--LabApp.default_url=/lab/tree/{COPIES.name}/start_here.ipynb"]  # it prints that
    print("Open the address below that ends in start_here.ipynb?token=...", flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "jupyter", "lab", *options])


def copy_lessons(lessons: Path, copies: Path) -> list[str]:
    """Gives each notebook in `lessons` a copy without outputs in `copies`.

    Replaces a copy of an earlier version unless it has been run or edited; returns the names of
    those that it kept for that reason. Leaves every other file alone. Raises UserError, before it
    writes, for a notebook that is damaged and for `copies` that is not a folder.
    """
    notebooks, kept = {}, []
    for path in sorted(lessons.glob("*.ipynb")):
        try:
            notebooks[path.name] = one = prepared(json.loads(path.read_bytes()))
            one["metadata"][MADE_FROM] = hash_of_cells(one)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{path} is not a notebook; git restore it, or remove it if it is"
                            " yours") from None
    if os.path.lexists(copies) and not copies.is_dir():
        raise UserError(f"{copies} is a file or a broken link, not a folder; rename or remove it")
    copies.mkdir(exist_ok=True)
    for name, notebook in notebooks.items():
        made_from, copy = notebook["metadata"][MADE_FROM], copies / name
        mine = read_json(copy)
        if origin(mine) == made_from:
            continue
        if copy.exists() and (origin(mine) is None or origin(mine) != hash_of_cells(mine)):
            kept.append(name)
            continue
        replace_file(copy, (json.dumps(notebook, ensure_ascii=False, indent=1) + "\n").encode())
    return kept


def prepared(notebook: dict) -> dict:
    """The notebook with no output and no execution count and with its set-up code folded away,
    changed in place."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
        if "setup" in cell["metadata"].get("tags", ()):
            cell["metadata"]["jupyter"] = {"source_hidden": True}
    return notebook


def hash_of_cells(notebook: dict) -> str:
    """A hash of what a reader can change in a notebook: its cells' sources and outputs."""
    what = [("".join(cell["source"]), cell.get("outputs")) for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def origin(copy: object) -> str | None:
    """The hash of the cells that a copy was made from; None for any other file."""
    try:
        return copy["metadata"][MADE_FROM]
    except (KeyError, TypeError):
        return None


if __name__ == "__main__":
    run_command(main)
