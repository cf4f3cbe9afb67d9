"""What the commands have in common: arguments, and errors in one line."""

import argparse


class Parser(argparse.ArgumentParser):
    """Answers a wrong command line with one line."""

    def error(self, message):
        self.exit(2, f"error: {message}; see --help\n")


def positive(text: str) -> int:
    """An int from 1 on, for argparse."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """An int from 0 on, for argparse."""
    return _at_least(0, text)


def _at_least(least, text):
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} on")
    return int(text)
