"""Measurements of decoding."""
