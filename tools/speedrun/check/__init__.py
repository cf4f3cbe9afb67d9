"""The learner's path: is train/train_gpt.py the milestone, and if not, which of its blocks is not?

No milestone has code of its own here. `trace` observes what a script does, `differences` sets two
such traces side by side, `transplant` puts blocks of the learner's script into the milestone's to
find those at fault, and `guide` and `hints` find words for them in the milestones' guides.
"""
