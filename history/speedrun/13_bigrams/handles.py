"""How to get hold of the parts that are new in 13: a table of bigrams, which the stream reads."""

STREAMS = {"embed": "embed", "lm_head": "embed", "bigram_embed": "bigrams"}

FEATURES = {
    "bigrams have more rows than the vocabulary, and share them": lambda module, args: (
        args.vocab_size < args.bigram_rows < args.vocab_size**2),
}
