"""What this machine can run, and what to do about the rest."""
