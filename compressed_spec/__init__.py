"""Tree speculative decoding, provably exact, for models whose attention compresses history."""

__version__ = "0.1.0"
