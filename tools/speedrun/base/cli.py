"""Shared by the commands: types of arguments, and errors in one line."""

import argparse
import errno
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from speedrun import enter_venv, install_command
from speedrun.base.errors import UserError
from speedrun.base.text import visible


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message):
        self.exit(2, f"error: {visible(message)}; see --help\n")

    def parse_args(self, *arguments):
        args = self.parse_intermixed_args(*arguments)  # RUN --json RUN
        if getattr(args, "json", None) is True and getattr(sys.stdout, "name", None) == 1:
            raise UserError("stdout is closed, but --json prints there; open it")
        return args


def positive(text: str) -> int:
    """An int from 1 on, for argparse."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """An int from 0 on, for argparse."""
    return _at_least(0, text)


def not_negative(text: str) -> float:
    """A finite float from 0 on, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (number >= 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def folder(text: str) -> Path:
    """The path of a folder, for argparse, also with the ~ that a shell leaves in --out=~/runs; an
    empty one would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the folder's name is empty")
    return Path(os.path.expanduser(text))


def run_command(main: Callable[[], int], *errors: type[Exception],
                needed: tuple[str, ...] = ()) -> NoReturn:
    """Ends the process with the exit code of `main`; an error of the user's becomes one line.

    Those are UserError (with its own exit code), OSError, a missing package, and `errors`. A closed
    stdout, as in `... | head`, ends it silently. A Python that lacks a requirement, or one of
    `needed` where only these are, is replaced by the repository's .venv, if there is one.
    """
    status, message = 1, None
    _open_closed_streams()
    enter_venv(needed=needed)
    sys.stdout.reconfigure(errors="replace")  # a console may lack some characters
    try:
        status = main()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        status, message = 130, "interrupted"
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed here: {install_command()}"
        if error.name in sys.stdlib_module_names:  # resource, for example
            message = f"{sys.platform} has no Python module {error.name}; use Linux, macOS or WSL"
    except ImportError as error:  # a package that is there and broken, or of another version
        message = f"{str(error).splitlines()[0]}; install again: {install_command()}"
    except (UserError, OSError, *errors) as error:
        status, message = getattr(error, "status", 1), error
        if isinstance(error, OSError) and error.strerror:
            message = _explain(error)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing but the exit is left to interrupt
    if message is not None:
        print(f"error: {visible(str(message))}", file=sys.stderr)
    sys.exit(status)


def _open_closed_streams():
    """Opens the null device as stdin, stdout and stderr if they are closed (`>&-`): the next file
    that is opened would take their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, "w" if number else "r"))


def _explain(error):
    """An OSError in words, with what to do where that is known."""
    advice = {
        errno.EMFILE: "first type: ulimit -n 1024",
        errno.ENOSPC: "make room" + (
            "" if error.filename else " where it writes, or in TMPDIR's folder"),
    }
    file = error.filename and os.fsdecode(error.filename)
    reason = ": ".join(filter(None, [file, error.strerror]))
    return "; ".join(filter(None, [reason, advice.get(error.errno)]))


def _at_least(least, text):
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} on")
    return int(text)
