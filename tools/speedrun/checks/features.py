"""The switches of an architecture in words: what a check is called, expects and says."""

from dataclasses import dataclass, field

STREAM, ATTENTION = "stream", "attention"  # what a switch is about


@dataclass(frozen=True)
class Feature:
    """A switch of Architecture: the check's name, the part of the model, what each value means in
    words, and what usually lies behind a value that is not wanted."""

    switch: str
    name: str
    part: str
    words: dict[object, str]
    meanings: dict[object, str] = field(default_factory=dict)


FEATURES = (
    Feature("positions", "position table", STREAM, {
        "table": "a learned position table, added to the embedding",
        "rotary": "no position table",
    }, {"table": "Rotary positions replace the table: it goes."}),
    Feature("embed_norm", "embedding norm", STREAM, {
        True: "the embedding is normalised before the first layer",
        False: "the embedding as it is",
    }, {False: "x0 is norm(embed(inputs)), and the stream starts as x0."}),
    Feature("norms", "norms", STREAM, {
        "all": "a norm before attention, before the MLP and before the head",
        "no_final": "no norm before the head",
        "no_mlp": "no norm before the MLP",
    }),
    Feature("activation", "activation", STREAM, {
        "gelu": "GELU", "gelu_tanh": "the tanh approximation of GELU", "relu": "ReLU",
        "relu2": "squared ReLU", "square": "the square, also of what is negative", "silu": "SiLU",
    }, {
        "relu": "A ReLU that is not squared: relu(x).square().",
        "square": "Square what is left after the ReLU, not x itself.",
        "gelu_tanh": "This is the exact GELU, with erf.",
    }),
    Feature("skips", "skip connections", STREAM, {
        "none": "no skip from the first half of the layers to the second",
        "lifo": "the second half adds outputs of the first in mirrored order, the last one first",
        "fifo": "the second half adds outputs of the first, the first one first",
        "inputs": "the second half adds the inputs of the first half's layers, mirrored",
        "after": "the second half adds outputs of the first behind its blocks",
    }, {
        "fifo": "The skips are a stack: pop() the last one, not pop(0).",
        "inputs": "Push x after the layer, when attention and MLP have been added.",
        "after": "A skip is added before the block, before its mixture with x0.",
    }),
    Feature("shortcut", "embedding shortcut", STREAM, {
        "stream": "at the start a layer gets the stream, and none of the embedding",
        "embedding": "at the start a layer gets the embedding, and none of the stream",
    }, {"embedding": "The weights start as (1, 0): the 1 belongs to the stream."}),
    Feature("softcap", "logit softcap", STREAM, {
        None: "logits without a cap", 30.0: "30 tanh(logits / 30)", 15.0: "15 tanh(logits / 15)",
        50.0: "50 tanh(logits / 50)", 1.0: "tanh(logits)",
    }, {15.0: "15 comes with a later record; here the cap is 30."}),
    Feature("positions", "positions", ATTENTION, {
        "table": "the position table alone", "none": "no trace of positions",
        "rotary": "queries and keys rotated by their position",
    }, {"none": "Is the rotation called, and is its result used?"}),
    Feature("rotated", "rotation", ATTENTION, {
        "qk": "queries and keys are rotated, values are not", "qkv": "values are rotated too",
        "q": "only queries are rotated", "k": "only keys are rotated",
    }, {"qkv": "Rotary encodes positions in the scores; values must not turn."}),
    Feature("frequencies", "rotation frequencies", ATTENTION, {
        "10000": "angle t / 10000^(2i/D) for pair i of D dimensions",
        "1000": "angle t / 1000^(2i/D)", "slow": "angle t / 10000^(i/D)",
        "alike": "the same angle for all pairs",
    }, {"slow": "Pair i stands for dimension 2i: is the exponent 2i/D?"}),
    Feature("qk_norm", "normalised queries and keys", ATTENTION, {
        "none": "no norm on queries and keys", "both": "every head's queries and keys normalised",
        "q": "only queries normalised", "k": "only keys normalised",
        "qkv": "values normalised too",
        "width": "queries and keys normalised over all heads together",
    }, {
        "none": "Apply norm to q and k per head, before or after the rotation (it is the same).",
        "width": "Split into heads first: each head's D numbers get an RMS of 1.",
    }),
    Feature("attn_factor", "attention branch", ATTENTION, {
        "depth": "attention times 1 / sqrt(2 x layers)", "literal": "attention times 1 / sqrt(24)",
        "one": "attention added as it is",
    }, {
        "literal": "The factor follows the number of layers now.",
        "depth": "With projections that start at zero the factor is not needed: drop it.",
    }),
    Feature("score_scale", "score scale", ATTENTION, {
        "head": "scores times 1 / sqrt(head_dim)", "width": "scores times 1 / sqrt(model_dim)",
        "one": "scores as they are",
    }),
    Feature("norms", "norm before attention", ATTENTION, {
        "all": "a norm before attention", "no_attn": "no norm before attention",
    }),
    Feature("mask", "causal mask", ATTENTION, {
        "causal": "each token sees itself and the tokens before it",
        "none": "each token sees all tokens, also later ones",
        "strict": "each token sees only the tokens before it, not itself",
        "both_ways": "each token sees as far ahead as the window reaches back",
    }, {
        "none": "A model that sees the token it shall predict learns nothing: q >= k.",
        "both_ways": "A window alone is not causal: q >= k as well.",
    }),
    Feature("documents", "documents", ATTENTION, {
        "ignored": "tokens see other documents", "apart": "tokens see their own document only",
        "exclusive": "a document's first token sees the document before it, not its own",
        "first_row": "all rows have the documents of the first row of the batch",
        "across": "bos tokens are counted over the rows of the batch, not along the tokens",
    }, {
        "ignored": "Compare document numbers: (inputs == bos_id).cumsum(1).",
        "exclusive": "Count the bos token itself: the cumulative sum is inclusive, so that it "
                     "belongs to the document that it opens.",
        "first_row": "documents[b, q] with the row's own b, not documents[0, q].",
        "across": "cumsum(1): dimension 0 is the batch, 1 the tokens.",
    }),
    Feature("window", "window", ATTENTION, {
        "ignored": "the window makes no difference",
        "below": "a token sees `window` tokens, itself included (q - k < window)",
        "up_to": "a token sees window + 1 tokens, itself included",
        "short": "a token sees window - 1 tokens, itself included",
        "half": "a token sees half as many tokens as the window has",
    }, {
        "ignored": "forward takes the window behind inputs and targets; the mask needs it.",
        "up_to": "One too many: q - k < window, not <=.",
        "short": "One too few: q - k < window, and it counts the token itself.",
        "half": "The window is in tokens already, and looks back only: q - k < window.",
    }),
    Feature("value_residual", "value residual", ATTENTION, {
        "none": "each layer has values of its own only",
        "first": "each layer's values are mixed with the first layer's",
        "previous": "each layer's values are mixed with the mixed values of the layer before",
    }, {"previous": "Hand on the first layer's raw values, not the mix."}),
)
