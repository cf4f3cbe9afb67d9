"""Lets the model of a run write."""
