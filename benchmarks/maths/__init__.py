"""Cases, inputs and peers of the benchmarks of algorithms.py and compare_algorithms.py."""
