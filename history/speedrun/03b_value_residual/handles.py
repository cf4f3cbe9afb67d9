"""How to get hold of the parts that are new in 03b: attention reads the first layer's values."""

ATTENTION = ("x", "first_v")
