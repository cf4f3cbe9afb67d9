"""What a milestone's model is made of, found by running it, and a picture of that."""
