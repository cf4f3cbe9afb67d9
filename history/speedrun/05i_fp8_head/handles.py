"""How to get hold of the parts that are new in 05i."""

HEAD_IN_FP8 = True
