"""The command line: one thin file per command, and the demonstrations that only a command runs."""
