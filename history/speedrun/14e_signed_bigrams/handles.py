"""How to get hold of the parts that are new in 14e."""

FEATURES = {
    "rows of signs are shared": lambda module, args: args.sign_rows < args.bigram_rows,
}
