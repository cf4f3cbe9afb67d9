"""How to get hold of the parts that are new in 10d: stages, in which rows grow."""

ROW_FACTORS = (1, 2, 3)


def row_len(module, step, args):
    return module.stage(step, args).seq_len


def windows(module, args):
    return [row.window for row in module.stages(args)]


def pack(module, tokens, lengths, num_rows, args):
    by_row = (length for length in lengths for _ in range(num_rows))
    return module.packed_rows(tokens, _stages(module, by_row, args), args)


def _stages(module, lengths, args):
    """The stages of rows of these lengths; other lengths have a stage as well."""
    first, *later = module.stages(args)
    for length in lengths:
        row = first if length == first.seq_len else later[-1]
        yield row._replace(seq_len=length)


def warm_up(module, model, optimizers, batches, args):
    module.warm_up(model, optimizers, batches, args)


def _stage_of_steps(module, args):
    """The stage of each step, by its number."""
    table = module.stages(args)
    return [table.index(module.stage(step, args)) for step in range(args.train_steps)]


def _rate_jumps(module, args):
    step = _stage_of_steps(module, args).index(1)
    return module.lr_multiplier(step, args) > module.lr_multiplier(step - 1, args)


FEATURES = {
    "there are three stages and an end": lambda module, args: (
        set(_stage_of_steps(module, args)) == {0, 1, 2, 3}),
    "a stage begins with a jump of the rate": _rate_jumps,
}
