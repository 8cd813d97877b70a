"""A real sentence-embedding model under several schemes: size, latency, fidelity. `python -m bench.minilm --help`."""
