"""How to get hold of the parts that are new in 05b: tables of value embeddings."""

ATTENTION = ("x", "values", "mask")


def value_tables(model):
    return [table.weight for table in model.value_embeds.values()]


def value_table_pattern(record, num_layers):  # alike in both halves, as in the record
    half = "0".ljust(num_layers // 2, "." if "." in record else "1")
    return half + half[::-1]
