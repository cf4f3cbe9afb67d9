"""Shows a change block by block."""
