"""Benchmarks: workloads, what is measured under them, and reports that compare configurations."""
