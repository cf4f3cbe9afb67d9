"""Aligns two texts: which lines stay, change, are added or removed, and which words change."""

import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache
from itertools import groupby, product, zip_longest

SAME, INDENTED, CHANGED, REMOVED, ADDED, FOLDED = " ", ">", "~", "-", "+", "⋯"
AWAY, HERE = "«", "»"  # of a line that moved: where it was, and where it is

WORD = re.compile(r"\d[\w.]*(?:(?<=[eE])[-+]\d+)?|\w+|[^\w\s]")  # 3.6e-4 is one word
ALIKE = 0.5  # share of common words from which on two lines are one line, changed
MOST_PAIRS = 40_000  # larger regions than these lines x lines are not searched for changed lines
CONTEXT = 3  # lines shown around a change
MOVED = 20  # letters and digits that a run of lines needs in order to count as moved


@dataclass(frozen=True)
class Line:
    """A line of a file: its number from 1, its text, the (start, end) of the words in it that
    changed, and whether it stands unchanged elsewhere in the other file."""

    number: int
    text: str
    spans: tuple[tuple[int, int], ...] = ()
    moved: bool = False


@dataclass(frozen=True)
class Row:
    """A line of the old text beside one of the new; mark is SAME, INDENTED (only the indentation
    changed), CHANGED (with marked words only if the lines are alike), REMOVED (`new` is None) or
    ADDED (`old` is None)."""

    mark: str
    old: Line | None
    new: Line | None


def align(old: Sequence[Line], new: Sequence[Line]) -> list[Row]:
    """The rows of two texts, in reading order.

    Lines that are equal, or equal but for the indentation, are the same line; then those that share
    half of their words. The rest is put side by side in its order.
    """
    a, b = ([line.text.lstrip() for line in lines] for lines in (old, new))
    # A line without a word, such as `)`, occurs anywhere, so it cannot anchor the alignment.
    matcher = SequenceMatcher(lambda text: not re.search(r"\w", text), a, b, autojunk=False)
    rows = []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            rows += map(_kept, old[i1:i2], new[j1:j2])
        else:
            rows += _pair(old[i1:i2], new[j1:j2])
    return rows


def passages(rows: Sequence[Row], context: int = CONTEXT) -> Iterator[tuple[str, list[Row]]]:
    """The rows in groups (kind, rows): SAME, INDENTED, CHANGED (removed and added lines too), and
    FOLDED for those further than `context` lines from a change, which need not be shown.

    Of lines re-indented in a row the first and the last count as changes.
    """
    near = set()
    for i, row in enumerate(rows):
        marks = {beside.mark for beside in rows[max(i - 1, 0) : i + 2]}
        is_within = marks == {INDENTED} and 0 < i < len(rows) - 1
        if row.mark != SAME and not is_within:
            near.update(range(i - context, i + context + 1))

    def kind_of(i):
        if i not in near:
            return FOLDED
        return rows[i].mark if rows[i].mark in (SAME, INDENTED) else CHANGED

    for kind, numbers in groupby(range(len(rows)), kind_of):
        group = [rows[i] for i in numbers]
        if kind == FOLDED and len(group) == 1:  # a note would not be shorter
            kind = group[0].mark
        yield kind, group


def counts(rows: Sequence[Row]) -> tuple[int, int, int]:
    """Lines added, removed and re-indented; a changed line is one of each of the first two, and so
    is a moved line."""
    marks = [row.mark for row in rows]
    changed = marks.count(CHANGED)
    return marks.count(ADDED) + changed, marks.count(REMOVED) + changed, marks.count(INDENTED)


def hunks(rows: Sequence[Row], context: int = CONTEXT) -> Iterator[list[tuple[str, list[Row]]]]:
    """The passages of a block in hunks: runs of passages that are shown, and each folded one by
    itself."""
    for _, group in groupby(enumerate(passages(rows, context)),
                            lambda pair: pair[0] if pair[1][0] == FOLDED else -1):
        yield [passage for _, passage in group]


def mark_moved(blocks: Sequence[Sequence[Row]]) -> list[tuple[Row, ...]]:
    """The rows of several blocks with those lines marked that only moved: runs of removed lines
    that were added elsewhere as they were, perhaps re-indented, with MOVED letters or more. Other
    marks are removed."""
    changed = [row for rows in blocks for row in rows if row.mark in (REMOVED, ADDED, CHANGED)]
    gone = [row.old for row in changed if row.old]
    came = [row.new for row in changed if row.new]
    places, left, right = {}, set(), set()
    for j, line in enumerate(came):
        places.setdefault(line.text.strip(), []).append(j)
    for i, line in enumerate(gone):
        for j in places.get(line.text.strip(), ()):
            size = _run(gone, came, i, j, left, right)
            if sum(map(str.isalnum, "".join(x.text for x in gone[i : i + size]))) >= MOVED:
                left |= {x.number for x in gone[i : i + size]}
                right |= {x.number for x in came[j : j + size]}
    return [tuple(_with_moved(row, left, right) for row in rows) for rows in blocks]


def folded_line(rows: Sequence[Row]) -> str:
    """The note that replaces lines that are not shown, all of them with the same mark."""
    fate = "re-indented" if rows[0].mark == INDENTED else "the same"
    return f"{FOLDED} {len(rows)} lines {fate}"


def _run(gone, came, i, j, left, right):
    """How many lines from i and from j on are equal, end to end in both files, and not taken."""
    size = 0
    while (i + size < len(gone) and j + size < len(came)
           and gone[i + size].number == gone[i].number + size
           and came[j + size].number == came[j].number + size
           and gone[i + size].number not in left and came[j + size].number not in right
           and gone[i + size].text.strip() == came[j + size].text.strip()):
        size += 1
    return size


def _with_moved(row, left, right):
    """The row with its lines marked that moved; their words did not change."""
    if row.mark not in (REMOVED, ADDED, CHANGED):
        return row
    is_away = row.old is not None and row.old.number in left
    is_here = row.new is not None and row.new.number in right
    was_marked = (row.old and row.old.moved) or (row.new and row.new.moved)
    if not (is_away or is_here or was_marked):
        return row
    return Row(row.mark, row.old and replace(row.old, spans=(), moved=is_away),
               row.new and replace(row.new, spans=(), moved=is_here))


def _kept(old, new):
    """The row of lines that are equal but for the indentation."""
    return Row(SAME if old.text == new.text else INDENTED, old, new)


def _pair(old, new):
    """Rows of a region without equal lines: alike ones side by side, the most alike first."""
    found, pairs = [], []
    if len(old) * len(new) <= MOST_PAIRS:
        a, b = ([_words(line.text) for line in lines] for lines in (old, new))
        for i, j in product(range(len(a)), range(len(b))):
            found.append((2 * len(a[i] & b[j]) / (len(a[i]) + len(b[j]) or 1), i, j))
    for likeness, i, j in sorted(found, key=lambda pair: -pair[0]):
        if likeness < ALIKE:
            break
        at = bisect(pairs, (i, j))
        if all((i - x) * (j - y) > 0 for x, y in pairs[max(at - 1, 0) : at + 1]):
            pairs.insert(at, (i, j))  # it crosses none
    rows, a, b = [], 0, 0
    for i, j in pairs:
        rows += [*_beside(old[a:i], new[b:j]), _changed(old[i], new[j])]
        a, b = i + 1, j + 1
    return rows + _beside(old[a:], new[b:])


def _beside(old, new):
    """Rows of lines that have no words in common."""
    return [_kept(a, b) if a and b and a.text.lstrip() == b.text.lstrip()  # no words at all
            else Row(CHANGED if a and b else REMOVED if a else ADDED, a, b)
            for a, b in zip_longest(old, new)]


def _changed(old, new):
    """The row of a changed line, with the words in it that changed."""
    if old.text.lstrip() == new.text.lstrip():  # `)` and the like, which anchor nothing
        return _kept(old, new)
    a, b = (list(WORD.finditer(line.text)) for line in (old, new))
    matcher = SequenceMatcher(None, [x[0] for x in a], [x[0] for x in b], autojunk=False)
    removed, added = [], []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal" and i1 < i2:
            removed.append((a[i1].start(), a[i2 - 1].end()))
        if tag != "equal" and j1 < j2:
            added.append((b[j1].start(), b[j2 - 1].end()))
    return Row(CHANGED, replace(old, spans=tuple(removed)), replace(new, spans=tuple(added)))


@cache
def _words(text):
    """What a line is known by: its words, without those of a comment behind code."""
    words = WORD.findall(text.partition("#")[0].strip() or text)
    return frozenset(word for word in words if re.match(r"\w", word)) or frozenset(words)
