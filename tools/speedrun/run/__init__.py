"""Runs a script and sums the run up."""
