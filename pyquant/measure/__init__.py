"""Instruments: timing in interleaved rounds, physical floors, energy, kernel tuning, and the machine of a figure."""
