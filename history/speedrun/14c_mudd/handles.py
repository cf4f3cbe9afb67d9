"""How to get hold of the parts that are new in 14c."""

LAST_MIXES = True


FEATURES = {
    "coefficients come from fewer channels": lambda module, args: (
        args.coefficient_dim < args.model_dim),
}
