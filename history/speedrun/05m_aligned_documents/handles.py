"""How to get hold of the parts that are new in 05m: rows that begin with documents."""


def token_batches(module, pattern, step_tokens, seq_len, aligned, **common):
    return module.token_batches(pattern, step_tokens, seq_len, aligned=aligned, **common)
