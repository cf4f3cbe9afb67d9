"""The library the commands in tools/ share; each module has one duty and imports fast."""
