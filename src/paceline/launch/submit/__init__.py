"""Jobs for the batch system of a cluster: what is written, what is submitted, and what became of it."""
