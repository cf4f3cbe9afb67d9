"""The library behind the commands in tools/, and the environment that they run in: if Python is
too old or a requirement is missing, a command continues in the .venv that make fills."""

import os
import sys
from importlib.util import find_spec


def _end(kind, error, trace):
    """Ctrl-C before a command has taken over ends it in one line, too."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("error: interrupted\n")
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _end  # while modules are imported
LEAST_PYTHON = (3, 11)
ROOT = os.path.abspath(os.path.join(__file__, *[".."] * 3))  # old Pythons read this file, too
VENV = os.path.join(ROOT, ".venv")
RESTARTED = "SPEEDRUN_RESTARTED"  # environment variable between enter_venv and its next call
NEEDED = ("torch", "numpy", "rich")


def enter_venv(is_old: bool = False, needed: tuple = NEEDED) -> None:
    """Restarts this command in the repository's .venv, if that exists and this Python is too old
    or a needed package is missing; else returns. Not under -S, which excludes all packages. Ends
    this process, in one line, if it was restarted and is still not in the .venv."""
    restarted = os.environ.pop(RESTARTED, None)
    python = os.path.join(VENV, "bin", "python")
    if (os.access(python, os.X_OK) and os.path.realpath(sys.prefix) != os.path.realpath(VENV)
            and not sys.flags.no_site
            and (is_old or any(find_spec(name) is None for name in needed))):
        if restarted:
            sys.exit(f"error: {VENV} is damaged: its Python does not run in it; make it again:"
                     f" rm -r {os.path.relpath(VENV)}, then {install_command()}")
        os.environ[RESTARTED] = "1"
        sys.stdout.flush()
        os.execv(python, [python, *sys.argv])


def install_command() -> str:
    """The command that installs an environment with all requirements."""
    folder = "" if os.getcwd() == ROOT else f"-C {os.path.relpath(ROOT)} "
    return f"make {folder}-B .venv/installed"


if sys.version_info < LEAST_PYTHON:  # before the imports that an older one cannot parse
    enter_venv(is_old=True)
    sys.exit("error: this is Python {}.{}; 3.11 or newer is needed: {}".format(
        *sys.version_info[:2], install_command()))
