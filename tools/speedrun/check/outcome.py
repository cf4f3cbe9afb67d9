"""What a look at a script found, as it travels from the worker to the command."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """A look or a block called `name`: `got` is empty if it is as the milestone's.

    Else `expected` and `got` are for people, and `meaning` says what is proved to lie behind it, or
    is empty. part: the heading under which it is shown. block: the block that hints are for; "" for
    the name itself.
    """

    name: str
    expected: str = ""
    got: str = ""
    meaning: str = ""
    part: str = "what the script does"
    block: str = ""

    @property
    def passed(self) -> bool:
        """Whether it is as the milestone's."""
        return not self.got

    @property
    def key(self) -> str:
        """The name by which hints are found."""
        return self.block or self.name
