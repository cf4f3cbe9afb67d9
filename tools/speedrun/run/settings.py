"""The hyperparameters of a script as a table: what --set can change, and what each one means."""

from typing import TextIO

from speedrun.history.glossary import load_glossary
from speedrun.scripts.find import Script


def print_settings(script: Script, stream: TextIO) -> None:
    """Prints name, default, tiny value, unit and meaning of each hyperparameter to a text stream;
    a default that the machine decides is empty."""
    from rich.console import Console
    from rich.table import Table

    glossary, table = load_glossary(), Table(box=None, pad_edge=False)
    for title in ("--set", "default", "tiny", "unit", "meaning"):
        table.add_column(title, overflow="fold")
    for name, default in script.hyperparameters.items():
        if name != "log_dir":  # it is chosen with --out
            entry = glossary.get(name)
            words = (entry.unit, entry.meaning) if entry else ()
            table.add_row(name, _written(default), _written(script.tiny.get(name)), *words)
    Console(file=stream, highlight=False, markup=False).print(table)


def _written(value):
    if value is None:
        return ""
    return f"{value:_}" if type(value) is int else str(value)
