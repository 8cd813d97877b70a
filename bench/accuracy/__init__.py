"""How much accuracy quantisation costs, on models trained here from data that is on every machine: `make accuracy`."""
