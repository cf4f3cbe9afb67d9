"""How to get hold of the parts that are new in 10f."""

FEATURES = {
    "channels rotate and stay": lambda module, args: args.model_dim // args.num_heads >= 8,
}
