"""What is known of a loop of the user's own: its calls, its state, what its body does, and what it must not do."""
