"""The picture of a model as SVG: layers as columns along the residual stream."""

from collections.abc import Iterable
from html import escape

from speedrun.anatomy import ACCENT
from speedrun.anatomy.trace import Anatomy, Layer, anatomy
from speedrun.history.manifest import Manifest

WIDTH = 960
LEFT, RIGHT, GAP = 118, 118, 16  # room for embedding and head; between two columns
BOX = 34  # height of a box


def model_svg(manifest: Manifest, id: str, changed: str | Iterable[str] = (),
              background: str = "none") -> bytes:
    """The model of a milestone as an SVG picture.

    changed: what is drawn in colour: the id of an earlier milestone, from whose model the parts
    differ, or names of parts: "attn", "pair", "composed", "mlp", "window", "table", "gate", "skip",
    "x0", "bigrams", "values", "embed", "positions", "smear", "head", "cap"; "attn 3" is layer 3's.
    Lines are drawn in currentColor, so they take a page's colour. Each part is a group with its
    name as data-part.
    """
    picture = Picture(anatomy(manifest.get(id)), _changed(manifest, id, changed))
    return _svg(picture.draw(), picture.height, background, picture.in_words())


def strip_svg(manifest: Manifest, ids: Iterable[str], background: str = "none") -> bytes:
    """The models of these milestones, below each other; in colour: what differs from the last."""
    rows, top, before, words = [], 0, None, []
    for id in ids:
        picture = Picture(anatomy(manifest.get(id)),
                          _changed(manifest, id, before) if before else (), small=True)
        rows.append(f'<g transform="translate(0 {top})">{picture.draw()}</g>')
        words.append(picture.in_words())
        top, before = top + picture.height, id
    return _svg("".join(rows), top, background, " ".join(words))


def parts(model: Anatomy) -> dict[str, object]:
    """What the picture shows, by name: two models differ in a part if its values differ."""
    found = {
        "embed": model.tied, "head": (model.tied, model.fp8), "norm": model.norm,
        "positions": model.learned_positions or None, "smear": model.smear or None,
        "cap": model.cap,
    }
    for i, layer in enumerate(model.layers):
        if layer.attention:
            found[f"attn {i}"] = model.rotating, model.qk_norm
        found |= {
            f"mlp {i}": model.activation if layer.mlp else None, f"window {i}": layer.window,
            f"table {i}": layer.tables or None,
            f"x0 {i}": layer.x0 or None, f"values {i}": layer.first_values or None,
            f"bigrams {i}": layer.bigrams or None, f"pair {i}": layer.paired or None,
            f"composed {i}": layer.composed or None}
        found |= {f"gate {i} {k}": True for k in range(gates(layer))}
    found |= {f"skip {start}-{end}": True for start, end in model.skips}
    return {name: value for name, value in found.items() if value is not None}


def gates(layer: Layer) -> int:
    """The number of gates at the layer's attention; a gate may have several parameters."""
    return len({part for name in layer.gates for part in name.split(".")
                if layer.attention and "gate" in part and "scale" not in part})


def removed(manifest: Manifest, id: str, before: str) -> list[str]:
    """The names of the parts that the model of milestone `before` has and this one's has not."""
    now, then = (parts(anatomy(manifest.get(name))) for name in (id, before))
    gone = then.keys() - now.keys()
    return sorted({" ".join(name.split()[:2]) for name in gone})  # "gate 3" for one of its gates


def _changed(manifest, id, changed):
    if not isinstance(changed, str):
        return tuple(changed)
    now, then = (parts(anatomy(manifest.get(name))) for name in (id, changed))
    return tuple(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))


def _svg(body, height, background, words):
    paper = f'<rect width="100%" height="100%" fill="{background}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'role="img" style="max-width:100%;height:auto" color="black" '
        f'font-family="DejaVu Sans, Verdana, sans-serif" font-size="11" fill="currentColor">'
        f"<title>{escape(words)}</title>{paper}{body}</svg>").encode()


class Picture:
    """Draws one model. small: without texts, for several below each other."""

    def __init__(self, model: Anatomy, changed: tuple[str, ...], small: bool = False):
        self.model, self.changed, self.small = model, changed, small
        self.column = (WIDTH - LEFT - RIGHT) / len(model.layers)
        self.box = box = 15 if small else BOX  # its height
        self.step = 5 if small else 9  # from one arc to the next
        above = any(layer.tables or layer.first_values for layer in model.layers)
        # The rows' upper ends, and where lines run.
        self.tables = 28 if small else 52
        self.attn = self.tables + (12 if small else 32) * above
        self.stream = self.attn + box + (8 if small else 16)
        self.mlp = self.stream + (8 if small else 16)
        self.x0 = self.mlp + box + (6 if small else 14)
        self.arcs = self.x0 + (4 if small else 14)
        deepest = max((self._depth(*pair) for pair in model.skips), default=0)
        self.legend = self.arcs + deepest * self.step + (8 if small else 32)
        self.height = self.legend + (8 if small else 16 * len(self._facts()) - 4)

    def draw(self) -> str:
        """The SVG elements."""
        model, L = self.model, len(self.model.layers)
        title = (f'<tspan font-weight="bold">{escape(model.name)}</tspan> · {L} layers · '
                 f"{model.parameters / 1e6:.1f}M parameters")
        drawn = [self._text(8, 18, title, size=12 if self.small else 14, anchor="start"),
                 self._stream(), self._embedding(), self._ending()]
        drawn += [self._layer(i) for i in range(L)]
        drawn += [self._skip(*pair) for pair in sorted(model.skips)]
        drawn += [self._embedding_line(), self._first_values()]
        if not self.small:
            drawn += [self._text(LEFT - 14, y, label, anchor="end", faint=True)
                      for y, label in self._row_labels()]
            drawn += [self._text(LEFT, self.legend + 16 * row, escape(text), part, anchor="start")
                      for row, (part, text) in enumerate(self._facts())]
        return "".join(drawn)

    def in_words(self) -> str:
        """The picture for those who do not see it."""
        model = self.model
        words = [f"{model.name}: {len(model.layers)} layers."]
        words += [f"{text}." for _part, text in self._facts()]
        if model.skips:
            arcs = ", ".join(f"{start} to {self._name(end)}" for start, end in sorted(model.skips))
            words.append(f"Skips from layer {arcs}.")
        without = [str(i) for i, layer in enumerate(model.layers) if not layer.attention]
        if without:
            words.append(f"No attention in layer {', '.join(without)}.")
        return " ".join(words)

    # ------------------------------------------- layers ------------------------------------------
    def _left(self, i):
        return LEFT + i * self.column + GAP / 2

    def _middle(self, i):
        return LEFT + (i + 0.5) * self.column

    def _name(self, i):
        return "head" if i == len(self.model.layers) else str(i)

    def _layer(self, i):
        layer, x, width = self.model.layers[i], self._left(i), self.column - GAP
        middle, drawn = self._middle(i), []
        for name, y, there in (("attn", self.attn, layer.attention), ("mlp", self.mlp, layer.mlp)):
            body = self._box(x, y, width, self.box, f"{name} {i}", dashed=not there)
            if there:
                edge = y + self.box if name == "attn" else y
                body += self._path([(middle, edge), (middle, self.stream)], f"{name} {i}")
            drawn.append(self._part(f"{name} {i}" if there else f"no {name} {i}", body))
        if layer.paired:
            drawn.append(self._part(f"pair {i}", self._box(
                x + 3, self.attn + 3, width - 6, self.box - 6, f"pair {i}")))
        if layer.composed:
            drawn.append(self._part(f"composed {i}", self._circle(
                x, self.attn, f"composed {i}", ring=True)))
        if layer.window:
            drawn.append(self._window(i))
        if not self.small:
            drawn.append(self._text(middle, 42, i, faint=True))
            if layer.attention and not layer.window:
                drawn.append(self._text(middle, self.attn + 21, "all", f"attn {i}"))
            if layer.mlp:
                drawn.append(self._text(middle, self.mlp + 21, self.model.activation, f"mlp {i}"))
        if layer.tables:
            drawn.append(self._table(i))
        drawn += [self._part(f"gate {i}", self._circle(
            x + width - 9 * k, self.attn, f"gate {i} {k}")) for k in range(gates(layer))]
        return "".join(drawn)

    def _window(self, i):
        """A bar in attention's box, from its right end, the token itself, to the left; a number."""
        windows = [layer.window or 0 for layer in self.model.layers]
        width, part = self.column - GAP, f"window {i}"
        share = windows[i] / max(windows) * width
        body = (f'<rect x="{self._left(i) + width - share:g}" y="{self.attn + self.box - 5:g}" '
                f'width="{share:g}" height="5" fill="{self._colour(part)}" fill-opacity="0.6"/>')
        if not self.small:
            body += self._text(self._middle(i), self.attn + 19, f"{windows[i]:,}", part)
        return self._part(part, body)

    def _table(self, i):
        middle, part = self._middle(i), f"table {i}"
        width, height = (10, 6) if self.small else (24, 16)
        body = self._box(middle - width / 2, self.tables, width, height, part)
        body += self._path([(middle, self.tables + height), (middle, self.attn)], part)
        if not self.small:
            names = ",".join(name.rpartition(".")[2] for name in self.model.layers[i].tables)
            body += self._text(middle, self.tables + 12, names, part)
        return self._part(part, body)

    # ------------------------------------- embedding and head ------------------------------------
    def _stream(self):
        smear = self.model.smear
        pieces = [(66, 72), (72 + (8 if self.small else 38), WIDTH - RIGHT + 16)]
        return "".join(self._path([(start, self.stream), (end, self.stream)], width=3)
                       for start, end in (pieces if smear else [(66, WIDTH - RIGHT + 16)]))

    def _embedding(self):
        y, bottom = self.stream - self.box / 2, self.stream + self.box / 2
        body = self._box(8, y, 58, self.box, "embed")
        body += self._text(37, self.stream + 4, "embed", "embed")
        drawn = [self._part("embed", body)]
        if self.model.learned_positions:
            body = self._path([(50, bottom + 10), (50, bottom)], "positions", arrow=True)
            if not self.small:
                body += self._box(22, bottom + 10, 56, 20, "positions")
                body += self._text(50, bottom + 24, "position", "positions")
            drawn.append(self._part("positions", body))
        if self.model.smear:
            width = 8 if self.small else 38
            body = self._box(72, self.stream - 9, width, 18, "smear")
            if not self.small:
                body += self._text(91, self.stream + 4, "smear", "smear")
            drawn.append(self._part("smear", body))
        return "".join(drawn)

    def _ending(self):
        x, width, bottom = WIDTH - RIGHT + 16, 76, self.stream + self.box / 2
        body = self._box(x, self.stream - self.box / 2, width, self.box, "head")
        body += self._text(x + width / 2, self.stream + 4,
                           "head, FP8" if self.model.fp8 else "head", "head")
        drawn = [self._part("head", body)]
        if self.model.cap and not self.small:
            low, high = (f"{value:.3g}".replace("-", "−") for value in self.model.cap)
            drawn.append(self._part("cap", self._text(
                x + width / 2, bottom + 16, f"cap {low} … {high}", "cap")))
        if self.model.tied:
            y = self.legend - (4 if self.small else 20)
            body = self._path([(16, bottom), (16, y), (x + width / 2, y), (x + width / 2, bottom)],
                              "embed", dashed=True)
            if not self.small:
                body += self._text(WIDTH / 2, y - 5, "one matrix: embedding and head", "embed")
            drawn.append(self._part("tied", body))
        return "".join(drawn)

    # -------------------------------------------- lines ------------------------------------------
    def _embedding_line(self):
        """The embedding, below the layers, and into each that mixes it in."""
        readers = [i for i, layer in enumerate(self.model.layers) if layer.x0]
        if not readers:
            return ""
        x, y = (76, 9) if self.model.smear else (37, self.box / 2)
        points = [(x, self.stream + y), (x, self.x0), (self._left(readers[-1]) - 4, self.x0)]
        drawn = self._path(points, *(f"{name} {i}" for name in ("x0", "bigrams") for i in readers))
        for i in readers:
            x, names = self._left(i) - 4, [f"x0 {i}"]
            if self.model.layers[i].bigrams:
                names.append(f"bigrams {i}")
            arrow = self._path([(x, self.x0), (x, self.stream)], *names, arrow=True)
            for name in names:
                arrow = self._part(name, arrow)
            drawn += arrow
        return drawn

    def _first_values(self):
        """The first layer's values, above the layers, and into each that mixes them in."""
        readers = [i for i, layer in enumerate(self.model.layers) if layer.first_values]
        if not readers:
            return ""
        y = self.attn - (5 if self.small else 16)
        drawn = self._path([(self._middle(0), self.attn), (self._middle(0), y),
                            (self._middle(readers[-1]), y)], *(f"values {i}" for i in readers))
        for i in readers:
            x = self._middle(i)
            drawn += self._part(f"values {i}", self._path(
                [(x, y), (x, self.attn)], f"values {i}", arrow=True))
        return drawn

    def _depth(self, start, end):
        """How many skips lie inside this one, itself included: outer arcs run lower."""
        return sum(start <= a and b <= end for a, b in self.model.skips)

    def _skip(self, start, end):
        """From behind layer `start` to before layer `end`, or to before the head."""
        part, to_head = f"skip {start}-{end}", end == len(self.model.layers)
        x1 = self._left(start) + self.column - GAP + 4
        x2 = WIDTH - RIGHT + 6 if to_head else self._left(end) - 8
        y = self.arcs + self._depth(start, end) * self.step
        points = [(x1, self.stream), (x1, y), (x2, y), (x2, self.stream)]
        body = self._path(points, part, arrow=True)
        if to_head and not self.small:
            sign = "minus" if (start, end) in self.model.subtracted else "plus"
            body += self._text(x2 + 6, y + 4, f"{sign} a share", part, anchor="start")
        return self._part(part, body)

    def _row_labels(self):
        """(y, name) of the rows."""
        layers = self.model.layers
        yield 42, "layer"
        yield self.attn + 21, "attention"
        yield self.mlp + 21, "MLP"
        if self.model.tables:
            yield self.tables + 12, "value tables"
        if any(layer.first_values for layer in layers):
            yield self.attn - 13, "first values"

    def _facts(self):
        """(part, sentence) of what has no place in the drawing."""
        model, layers = self.model, self.model.layers
        share = {1.0: "all", 0.5: "half"}.get(model.rotating, f"{model.rotating:.0%}")
        positions = (f"{share} of a head's dimensions rotate with the position"
                     if model.rotating else "positions are learned vectors")
        norm = ", queries and keys normalised" if model.qk_norm else ""
        facts = [("attn", f"attention: {model.num_heads} heads of "
                          f"{model.model_dim // model.num_heads}{norm}; {positions}")]
        if any(layer.paired for layer in layers):
            facts.append(("pair", "the double box: two heads share a softmax"))
        composed = sorted({layer.composed for layer in layers} - {0})
        if composed:
            facts.append(("composed", "the ring: each head also uses a mixture of all heads' "
                          f"attention to the last {' or '.join(map(str, composed))} tokens"))
        windows = sorted({layer.window for layer in layers if layer.window})
        if windows:
            sizes = " or ".join(f"{window:,}" for window in windows)
            facts.append(("window", f"number and bar: a window of {sizes} tokens back, as at the "
                                    "end of training"))
        else:
            text = "document" if model.documents else "row"
            facts.append(("window", f"all: a token sees every token before it in its {text}"))
        if any(layer.gates for layer in layers):
            facts.append(("gate", "the dot: a gate for each head and token"))
        mlp = "norm" if "norm" in self.changed else "mlp"
        facts.append((mlp, f"MLP: {model.model_dim} → {model.hidden_dim:,} → {model.model_dim}, "
                             f"{model.activation}; {model.norm} before each branch and the head"))
        if model.tables:
            facts.append(("table", f"value tables: {len(model.tables)} of {model.vocab_size:,} x "
                                   f"{model.model_dim}, looked up by token"))
        if any(layer.x0 for layer in layers):
            facts.append(("x0", "the line below the layers: the embedding, mixed in again"))
        if any(layer.bigrams for layer in layers):
            facts.append(("bigrams", "on the same line: a vector for each pair of tokens"))
        if model.skips:
            facts.append(("skip", "an arc: a later layer or the head reads a layer's output again"))
        return facts

    # ------------------------------------------ elements -----------------------------------------
    def _is_changed(self, *names):
        """Whether one of these parts is in `changed`, by its name ("attn 3") or kind ("attn")."""
        return any(name == part or name.startswith(f"{part} ") or part.startswith(f"{name} ")
                   for name in names for part in self.changed)

    def _colour(self, *names):
        return ACCENT if self._is_changed(*names) else "currentColor"

    def _part(self, name, body):
        return f'<g data-part="{name}">{body}</g>'

    def _text(self, x, y, text, part="", *, size=11, anchor="middle", faint=False):
        colour = f' fill="{ACCENT}" font-weight="bold"' if self._is_changed(part) else ""
        opacity = ' fill-opacity="0.65"' if faint else ""
        return (f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"'
                f"{colour}{opacity}>{text}</text>")

    def _box(self, x, y, width, height, part, dashed=False):
        changed = self._is_changed(part)
        look = f'fill-opacity="{0 if dashed else 0.25 if changed else 0.08}"'
        look += ' stroke-dasharray="3 3"' if dashed else ""
        colour = self._colour(part)
        look += f' stroke-width="{1.6 if changed else 1}"'
        return (f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
                f'fill="{colour}" stroke="{colour}" {look}/>')

    def _circle(self, x, y, part, ring=False):
        colour = self._colour(part)
        look = f'fill="none" stroke="{colour}" stroke-width="2"' if ring else f'fill="{colour}"'
        return f'<circle cx="{x:g}" cy="{y:g}" r="{2.5 if self.small else 4}" {look}/>'

    def _path(self, points, *parts, width=1.2, dashed=False, arrow=False):
        """A line through the points; arrow: with a tip at the last, to which it runs vertically."""
        colour = self._colour(*parts)
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        drawn = (f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
                 f'stroke-linejoin="round"{dashes}/>')
        if arrow:
            (_x, before), (x, y) = points[-2:]
            back = 5 if before > y else -5
            drawn += f'<path d="M{x:g} {y:g}l-3 {back}h6z" fill="{colour}"/>'
        return drawn
