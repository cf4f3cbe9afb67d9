"""A training script: found, loaded, its sizes and its arithmetic."""
