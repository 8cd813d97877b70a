"""Measuring: timing in interleaved rounds, physical floors, peers, and the machine that the figures belong to."""
