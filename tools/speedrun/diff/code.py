"""Colours Python code with pygments, line by line."""

from collections.abc import Sequence

from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from speedrun.diff.lines import Line

# Token types and the class of their colour in page.html; the first that fits counts.
COLOURS = [
    (Comment, "c"), (String, "s"), (Number, "m"), (Keyword, "k"), (Operator.Word, "k"),
    (Name.Function, "n"), (Name.Class, "n"), (Name.Decorator, "n"),
]


def highlight(lines: Sequence[Line]) -> dict[int, list[tuple[str, str]]]:
    """For the id() of each line its text in pieces, (class of the colour or "", text); the lines
    are read as one program."""
    pieces, i = {id(line): [] for line in lines}, 0
    program = "\n".join(line.text for line in lines)
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    for kind, text in lexer.get_tokens(program):
        colour = next((name for type, name in COLOURS if kind in type), "")
        first, *rest = text.split("\n")
        if first:
            pieces[id(lines[i])].append((colour, first))
        for part in rest:
            i += 1
            if part:
                pieces[id(lines[i])].append((colour, part))
    return pieces
