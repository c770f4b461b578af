"""Loads torch's compiler front end where it is imported: a name for what workers of a strategy will need anyway."""

from paceline.compat import dynamo

dynamo.load()
