"""How to get hold of the parts that are new in 14f: networks decide what layers add."""

PER_TOKEN = True



def scalars(model):
    width, L = len(model.layer_init), len(model.blocks)
    values = model.scalars
    rows = values[: width * L].view(L, width)
    named = dict(zip(model.layer_init, rows.unbind(1), strict=True))
    return named | dict(zip(model.model_init, values[width * L :], strict=True))


def _early_and_late(name):
    """Whether attentions of both halves have a letter in the pattern of this name."""
    def found(module, args):
        layers = [layer for layer, letter in enumerate(getattr(args, name)) if letter != "."]
        return args.layer_without_attention not in layers and (
            layers[0] < args.late_layer <= layers[-1])
    return found


FEATURES = {
    "early and late attentions return their own values": _early_and_late("own_value_pattern"),
    "early and late attentions have gates": _early_and_late("gate_pattern"),
    "the last attention has gates": lambda module, args: args.gate_pattern[-1] != ".",
    "late layers begin within the skip": lambda module, args: (
        args.skip_from < args.late_layer <= args.skip_to),
}
