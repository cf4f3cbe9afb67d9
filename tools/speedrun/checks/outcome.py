"""What a check found, as it travels from the child process to the command."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The outcome of the check called `name`: `got` is empty if it passed. Else `expected` and
    `got` are for people, and `meaning` says what usually lies behind it (or is empty)."""

    name: str
    expected: str = ""
    got: str = ""
    meaning: str = ""

    @property
    def passed(self) -> bool:
        return not self.got


class NotThere(Exception):
    """Something that a check looks at is missing in the script: what an Outcome says of it."""

    def __init__(self, expected: str, got: str, meaning: str = ""):
        super().__init__(got)
        self.expected, self.got, self.meaning = expected, got, meaning


def verdict(name: str, good: bool, expected: str, got: str, meaning: str = "") -> Outcome:
    """The Outcome of a check that is `good` or not."""
    return Outcome(name) if good else Outcome(name, expected, got, meaning)


def number(value: float) -> str:
    """A number with four digits that count, as messages show it."""
    return f"{value:.4g}"
