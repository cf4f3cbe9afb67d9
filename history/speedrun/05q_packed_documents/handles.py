"""How to get hold of the parts that are new in 05q: packed documents."""


def document_len(args, length):
    return args.max_document_len


def longest_document(args):
    return args.max_document_len


def token_batches(module, pattern, step_tokens, seq_len, aligned, **common):
    return module.token_batches(pattern, step_tokens, seq_len, packed=aligned, **common)


def pack(module, tokens, lengths, num_rows, args):
    return module.packed_rows(tokens, next(lengths), args)
