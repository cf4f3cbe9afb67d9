"""The environment that make fills: commands that lack a requirement continue in it, or name it."""

import os
import sys
from importlib.util import find_spec

ROOT = os.path.abspath(os.path.join(__file__, *[".."] * 4))  # old Pythons read this file, too
VENV = os.path.join(ROOT, ".venv")
NEEDED = ("torch", "numpy", "rich")


def enter_venv(is_old: bool = False) -> None:
    """Restarts this command in the repository's .venv, if that exists and this Python is too old
    or lacks a requirement; else returns. Not under -S, which asks for no packages."""
    python = os.path.join(VENV, "bin", "python")
    if (os.access(python, os.X_OK) and os.path.realpath(sys.prefix) != os.path.realpath(VENV)
            and not sys.flags.no_site
            and (is_old or any(find_spec(name) is None for name in NEEDED))):
        sys.stdout.flush()
        os.execv(python, [python, *sys.argv])


def install_command() -> str:
    """What to type for an environment with all requirements."""
    folder = "" if os.getcwd() == ROOT else f"-C {os.path.relpath(ROOT)} "
    return f"make {folder}-B .venv/installed"
