"""Shows outcomes and progress, in colour on a terminal, as plain text elsewhere."""

import shutil
import textwrap
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.text import Text

from speedrun.base.text import visible

NARROWEST, WIDEST, PIPE = 30, 100, 100  # columns of text
_fold = partial(textwrap.wrap, break_on_hyphens=False)


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


class Screen:
    """A text stream to show things on."""

    def __init__(self, stream):
        self.console = Console(file=stream, highlight=False, markup=False, emoji=False,
                               soft_wrap=True)
        columns = shutil.get_terminal_size().columns if stream.isatty() else PIPE
        self.width = min(max(columns, NARROWEST), WIDEST)

    def line(self, text: str, style: str = "") -> None:
        """One line, however long, folded at the width."""
        for part in _fold(visible(text), self.width, subsequent_indent="  "):
            self.console.print(Text(part, style=style))

    def command(self, text: str) -> None:
        """A command line, in one piece, so that it can be copied."""
        self.console.print(Text(f"    {visible(text)}"))

    def text(self, text: str) -> None:
        """Several lines, each folded for itself; those that begin with a number are steps."""
        for line in text.split("\n"):
            hanging = "   " if line[:1].isdigit() else ""  # below a numbered step
            for part in _fold(line, self.width, subsequent_indent=hanging):
                self.console.print(Text(part))

    def outcome(self, outcome: Outcome) -> None:
        """One line if it passed, else what was expected, what came and what is proved of it."""
        if outcome.passed:
            self.console.print(Text.assemble(("  pass  ", "green"), visible(outcome.name)))
            return
        name = visible(outcome.name)
        self.console.print(Text.assemble(("  FAIL  ", "bold red"), (name, "bold")))
        for label, value in (("expected ", outcome.expected), ("got      ", outcome.got),
                             ("", outcome.meaning)):
            text, hanging = label + visible(value), " " * len(label)
            for part in _fold(text, self.width - 8, subsequent_indent=hanging) if value else []:
                self.console.print(Text(f"        {part}"))
