"""Loads torch's whole compiler in a process that forks workers, where there is no GPU: importing it there would open CUDA."""

import importlib

import torch

if torch.cuda.device_count() == 0:  # counting opens nothing
    importlib.import_module("paceline.compat.graphs")
