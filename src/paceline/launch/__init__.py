"""How workers come to be. `paceline.launch(function, workers=4)` is the way in from Python.

Nothing here loads torch before a worker does.
"""

from paceline import lazy

lazy.call(__name__, "paceline.launch.api", "launch")
