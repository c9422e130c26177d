"""Optimizer state by name, out of and into any optimizer over a sharded module."""
