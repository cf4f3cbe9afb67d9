"""A matplotlib figure as SVG that follows a light or dark page, with letters as letters."""

import colorsys
import io
import re
from xml.etree import ElementTree

from matplotlib import rc_context
from matplotlib.figure import Figure

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
PAPER, INK = 0.09, 0.90  # the lightness, in the dark, of white and of black
FLIPPED, PAPER_GROUP = "flipped", "paper"  # gids: what the dark turns over whole; the background
FONTS = "DejaVu Sans, Verdana, sans-serif"
DARK = (f"@media screen and (prefers-color-scheme: dark){{.{FLIPPED}"
        "{filter:invert(0.91) hue-rotate(180deg)}}")
for prefix, address in (("", SVG), ("xlink", XLINK)):
    ElementTree.register_namespace(prefix, address)


def themed_svg(figure: Figure, words: str) -> str:
    """The figure as an SVG element of its size in points, with `words` as its title.

    On a dark page each colour takes the lightness opposite to its own; its hue stays. Where the
    page is narrower, the picture shrinks until a point is a CSS pixel, and not further, so that
    letters of 11 points have at least 11 pixels. The same figure gives the same text.
    """
    drawn = io.StringIO()
    figure.patch.set_gid(PAPER_GROUP)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": words}):
        figure.savefig(drawn, format="svg", metadata=dict.fromkeys(
            ("Date", "Creator", "Format", "Type")))
    root = ElementTree.fromstring(drawn.getvalue())
    for old in root.findall(f"{{{SVG}}}metadata"):
        root.remove(old)
    for style in root.iter(f"{{{SVG}}}style"):  # matplotlib's is for every element of a page
        style.text = DARK
    width = float(root.get("viewBox").split()[2])
    ink = f"light-dark(#000000,{in_the_dark('#000000')})"
    root.set("style", f"color-scheme:light dark;fill:{ink};stroke-linejoin:round;max-width:100%;"
                      f"min-width:{width:g}px;height:auto")
    root.attrib.pop("height")
    root.set("role", "img")
    root.set("font-family", FONTS)
    title = ElementTree.Element(f"{{{SVG}}}title")
    title.text = words
    root.insert(0, title)
    _recolour(root, flipped=False)
    text = ElementTree.tostring(root, encoding="unicode")
    return re.sub(r"\s*\n\s*", " ", text).replace("> <", "><")


def in_the_dark(colour: str) -> str:
    """The colour of a dark page for a "#rrggbb" of a light one."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    rgb = colorsys.hls_to_rgb(hue, INK - (INK - PAPER) * light, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def _recolour(element, flipped):
    """Moves fonts and colours to where a page's scheme chooses; a flipped group keeps its own."""
    name = element.attrib.pop("id", "") if element.tag.endswith("}g") else ""
    if name in (FLIPPED, PAPER_GROUP):
        element.set("class", name)
    if element.tag.endswith("}image"):
        element.set("class", FLIPPED)
    if name == FLIPPED:
        element.set("fill", "#000000")  # its letters are turned over, too
    flipped |= name == FLIPPED
    style = re.sub(r"font-family:[^;]*;?\s*", "", element.get("style", ""))
    if style:
        if not flipped:
            for part, colour in re.findall(r"(fill|stroke): (#[0-9a-f]{6})", style):
                element.set(part, colour)  # for browsers of before 2024
                style = style.replace(
                    f"{part}: {colour}", f"{part}:light-dark({colour},{in_the_dark(colour)})")
        element.set("style", style.replace("; ", ";").replace(": ", ":"))
    for child in element:
        _recolour(child, flipped)
