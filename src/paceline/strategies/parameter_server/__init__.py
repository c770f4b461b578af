"""Parameters and their optimizer on servers; workers pull weights and push gradients."""

from paceline.strategies.parameter_server.strategy import ParameterServer

__all__ = ["ParameterServer"]
