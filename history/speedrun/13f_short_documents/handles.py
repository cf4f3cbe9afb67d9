"""How to get hold of the parts that are new in 13f: documents are shorter in the first stage."""


def document_len(args, length):
    return args.first_document_len if length == args.train_seq_len else args.max_document_len


FEATURES = {
    "documents are shorter in the first stage, which has several in a row": lambda module, args: (
        args.first_document_len < min(args.train_seq_len, args.max_document_len)),
}
