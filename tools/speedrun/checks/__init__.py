"""Checks of a learner's train_gpt.py against a milestone: what tools/check_train.py works with.

path, learner, catalog, session, hints, standing, take and show run in the command itself, without
torch. child and everything that it calls run in a process of their own, where the learner's script
may do what it wants.
"""
