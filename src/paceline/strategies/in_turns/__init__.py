"""Several models and optimizers in one run: joined, so that all else sees one of each; in a turn one optimizer trains alone."""
