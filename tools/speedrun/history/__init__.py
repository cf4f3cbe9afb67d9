"""The lists of milestones and records, and the scripts as text."""
