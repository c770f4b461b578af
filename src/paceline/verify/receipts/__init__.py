"""What a run has left behind, checked: its ledgers, its receipt, its checkpoints."""
