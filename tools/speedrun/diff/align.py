"""Lines two texts up: which lines stay, change, come and go, and which words change in a line."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import zip_longest

SAME, INDENTED, CHANGED, REMOVED, ADDED = " ", ">", "~", "-", "+"

WORD = re.compile(r"\d[\w.]*(?:(?<=[eE])[-+]\d+)?|\w+|\s+|[^\w\s]")  # 3.6e-4 is one word
ALIKE = 0.5  # share of common words from which on two lines are one line, changed
MOST_PAIRS = 40_000  # larger regions than these lines x lines are not searched for changed lines
SHORTEST_FOLD = 2  # lines that a note may stand for


@dataclass(frozen=True)
class Line:
    """A line of a file: its number from 1 (None: unknown), its text, and the (start, end) of the
    words in it that changed."""

    number: int | None
    text: str
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Row:
    """A line of the old text beside one of the new; mark is SAME, INDENTED (the indentation alone
    changed), CHANGED (with marked words only if the lines are alike), REMOVED (`new` is None) or
    ADDED (`old` is None)."""

    mark: str
    old: Line | None
    new: Line | None


@dataclass(frozen=True)
class Gap:
    """How many lines are not shown, and whether they were re-indented (else they are the same)."""

    lines: int
    indented: bool


def align(old: Sequence[Line], new: Sequence[Line]) -> list[Row]:
    """The rows of two texts, in reading order.

    Lines that are equal are the same line; then those that are equal but for the indentation;
    then those that share half of their words. What is left comes side by side as it stands.
    """
    rows = []
    for same, a, b in _regions(old, new, lambda line: line.text):
        if same:
            rows += [Row(SAME, x, y) for x, y in zip(a, b, strict=True)]
            continue
        for alike, c, d in _regions(a, b, lambda line: line.text.lstrip()):
            if alike:
                rows += [Row(INDENTED, x, y) for x, y in zip(c, d, strict=True)]
            else:
                rows += _pair(c, d)
    return rows


def shown(rows: Sequence[Row], context: int = 3) -> list[Row | Gap]:
    """The rows within `context` lines of a change, and a Gap for those between.

    Of lines re-indented in a row the first and the last count as changes.
    """
    def is_change(i):
        if rows[i].mark != INDENTED:
            return rows[i].mark != SAME
        beside = rows[max(i - 1, 0)].mark, rows[min(i + 1, len(rows) - 1)].mark
        return beside != (INDENTED, INDENTED) or i in (0, len(rows) - 1)

    kept = set()
    for i in filter(is_change, range(len(rows))):
        kept.update(range(i - context, i + context + 1))
    items, i = [], 0
    while i < len(rows):
        end = i
        while end < len(rows) and end not in kept:
            end += 1
        if end - i >= SHORTEST_FOLD:
            items.append(Gap(end - i, rows[i].mark == INDENTED))
        else:
            items += rows[i:end]
        if end < len(rows):
            items.append(rows[end])
        i = end + 1
    return items


def counts(rows: Sequence[Row]) -> tuple[int, int, int]:
    """Lines added, removed and re-indented; a changed line is one of each of the first two."""
    marks = [row.mark for row in rows]
    changed = marks.count(CHANGED)
    return marks.count(ADDED) + changed, marks.count(REMOVED) + changed, marks.count(INDENTED)


def runs(items: Sequence[Row | Gap]) -> Iterator[tuple[str, list]]:
    """Groups what `shown` returned: ("gap", [Gap]), ("same", rows), ("indented", rows) and
    ("changed", rows) for changed, removed and added lines in a row."""
    names = {SAME: "same", INDENTED: "indented"}
    kind, group = "", []
    for item in items:
        is_gap = isinstance(item, Gap)
        this = "gap" if is_gap else names.get(item.mark, "changed")
        if group and (this != kind or is_gap):
            yield kind, group
            group = []
        kind = this
        group.append(item)
    if group:
        yield kind, group


def _regions(old, new, key):
    """(equal or not, old lines, new lines) from the beginning to the end."""
    a, b = [key(line) for line in old], [key(line) for line in new]
    # Without a word a line says too little to tie two texts together: `)` stands anywhere.
    matcher = SequenceMatcher(lambda text: not re.search(r"\w", text), a, b, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        yield tag == "equal", old[i1:i2], new[j1:j2]


def _pair(old, new):
    """Rows of a region without equal lines: in order, such that the pairs have most in common."""
    if len(old) * len(new) > MOST_PAIRS:
        return _beside(old, new)
    a, b = [_words(line.text) for line in old], [_words(line.text) for line in new]
    best = [[0.0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i in reversed(range(len(old))):
        for j in reversed(range(len(new))):
            together = _likeness(a[i], b[j])
            pair = best[i + 1][j + 1] + together if together >= ALIKE else 0.0
            best[i][j] = max(best[i + 1][j], best[i][j + 1], pair)
    rows, i, j, a_done, b_done = [], 0, 0, 0, 0
    while i < len(old) and j < len(new):
        if best[i][j] == best[i + 1][j]:
            i += 1
        elif best[i][j] == best[i][j + 1]:
            j += 1
        else:
            rows += [*_beside(old[a_done:i], new[b_done:j]), _changed(old[i], new[j])]
            i, j = i + 1, j + 1
            a_done, b_done = i, j
    return rows + _beside(old[a_done:], new[b_done:])


def _beside(old, new):
    """Rows of lines that have nothing in common."""
    marks = {(True, True): CHANGED, (True, False): REMOVED, (False, True): ADDED}
    return [Row(marks[a is not None, b is not None], a, b) for a, b in zip_longest(old, new)]


def _changed(old, new):
    """The row of a changed line, with the words in it that changed."""
    if old.text.lstrip() == new.text.lstrip():  # `)` and the like, which tie no texts together
        return Row(SAME if old.text == new.text else INDENTED, old, new)
    a, b = WORD.findall(old.text), WORD.findall(new.text)
    starts = [[0], [0]]
    for words, offsets in zip((a, b), starts, strict=True):
        for word in words:
            offsets.append(offsets[-1] + len(word))
    spans = [[], []]
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        for found, offsets, (first, last) in zip(spans, starts, ((i1, i2), (j1, j2)), strict=True):
            if first < last:
                found.append((offsets[first], offsets[last]))
    words = [_words_only(line.text, found) for line, found in zip((old, new), spans, strict=True)]
    if any(words):
        spans = words
    return Row(CHANGED, *(replace(line, spans=tuple(found))
                          for line, found in zip((old, new), spans, strict=True)))


def _words_only(text, spans):
    """The spans without the spaces at their ends, which say nothing where words changed too."""
    found = []
    for start, end in spans:
        part = text[start:end]
        first, last = start + len(part) - len(part.lstrip()), end - len(part) + len(part.rstrip())
        if first < last:
            found.append((first, last))
    return found


def _words(text):
    """What a line is known by: its words, without those of a comment behind code."""
    words = [word for word in WORD.findall(text.partition("#")[0].strip() or text) if word.strip()]
    return frozenset(w for w in words if w[0].isalnum() or w[0] == "_") or frozenset(words)


def _likeness(a, b):
    return 2 * len(a & b) / (len(a) + len(b)) if a and b else 0.0
