"""What a milestone's model is made of, found by running it, and a picture of that."""

ACCENT = "#d55e00"  # what changed; distinct from grey for colour-blind readers too
