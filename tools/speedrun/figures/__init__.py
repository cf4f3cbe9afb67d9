"""The generated tables and pictures."""
