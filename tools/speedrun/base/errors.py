"""Errors that are reported to the user in one line."""


class UserError(Exception):
    """An error that the user can fix: the text is one line for them, `status` the exit code."""

    def __init__(self, text: str, status: int = 1):
        super().__init__(text)
        self.status = status


class Stopped(UserError):
    """A signal ended this process's work; the exit code is 128 + the signal's number."""
