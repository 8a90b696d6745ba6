"""Parts of `benchmarks/scale.py`: simulated ranks, the cases, the figures."""
