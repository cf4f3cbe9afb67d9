"""What every command needs."""
