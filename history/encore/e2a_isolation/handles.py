"""How to get hold of the parts that are new in e2a: a mask of documents."""

ATTENTION = ("x", "first_v", "mask")
READS_DOCUMENTS = True
