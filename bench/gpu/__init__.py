"""`python -m bench.gpu`: what `make gpu` does, in slices that go on (`steps.py` says what, `process.py` how)."""
