"""What a script would need on GPUs that are not here: its own main() on tensors without data."""
