"""What a script, a prompt or a notebook calls: train, resume, load and verify, with the options of the command line."""
