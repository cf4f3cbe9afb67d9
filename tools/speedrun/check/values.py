"""The hyperparameters at which scripts are traced."""

from speedrun.history.fields import default_hyperparameters
from speedrun.history.glossary import load_glossary
from speedrun.history.manifest import Milestone, load_manifest

ODD = 0.93  # times a learning rate and the like: nobody writes such a number into a script


def odd_values(milestone: Milestone) -> dict[str, object]:
    """The hyperparameters at which the milestone and scripts like it are traced."""
    values, manifest = {}, load_manifest()
    patterns = load_glossary().of_kind("pattern")
    fixed, tiny = manifest.inherited(milestone, "check"), manifest.overrides(milestone, "tiny")
    for name, default in default_hyperparameters(milestone.script).items():
        value = fixed.get(name, tiny.get(name, default))
        if isinstance(value, float) and name not in fixed:
            value *= ODD
        if name in fixed or value is not None and not isinstance(value, str):
            values[name] = value
        elif name in patterns:  # a letter per layer, as in the record
            values[name] = default[: fixed.get("num_layers", tiny.get("num_layers"))]
    return values
