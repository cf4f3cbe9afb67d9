"""How to get hold of the parts that are new in 14g: heads that are composed."""

ATTENTION = ("x", "values", "c", "mask", "document_ids")

FEATURES = {
    "the mixture of heads sees less than a block and a document": lambda module, args: (
        1 < args.composed_window < min(args.composed_block, args.first_document_len)),
    "a row has several blocks": lambda module, args: (
        2 * args.composed_block < args.train_seq_len),
}
