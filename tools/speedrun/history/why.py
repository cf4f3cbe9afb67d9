"""Reads a milestone's why.md: its idea in two minutes, for readers who know what a transformer is
and nothing else, and the name of its figure."""

import re
from dataclasses import dataclass
from html import unescape
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.history.manifest import Milestone

FILE = "why.md"
LONGEST = 120  # words of the text, without the figure's
_FORM = re.compile(r"(?P<text>\S.*?)\n\n!\[(?P<shown>[^\]\n]+)\]\(why\.svg\)\n", re.S)


@dataclass(frozen=True)
class Why:
    """The text of a why.md, Markdown in paragraphs; what its figure shows, in words; the figure's
    file."""

    text: str
    shown: str
    figure: Path

    @property
    def words(self) -> int:
        """How long the text is."""
        return len(self.text.split())

    @property
    def number(self) -> str:
        """The figure's number, what it counts and where it is from, as one line; raises OSError
        where the figure is missing."""
        drawn = self.figure.read_text(encoding="utf-8")
        return unescape(re.search("<title>(.*?)</title>", drawn, re.S)[1])

    def as_markdown(self, folder: str) -> str:
        """The text and the figure; folder: the address of the milestone's folder."""
        return f"{self.text}\n\n![{self.shown}]({folder}/{self.figure.name})"


def load_why(milestone: Milestone) -> Why | None:
    """The Why of a milestone, None without one.

    Raises UserError, one line, for a file that is not a text followed by its figure.
    """
    file = milestone.folder / FILE
    if not file.exists():
        return None
    found = _FORM.fullmatch(file.read_text(encoding="utf-8"))
    if not found:
        raise UserError(f"{short(file)}: it should be a text, an empty line and the line"
                        " ![what the figure shows](why.svg)")
    return Why(found["text"], found["shown"], milestone.folder / "why.svg")
