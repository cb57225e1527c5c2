"""Draws results; computes nothing."""
